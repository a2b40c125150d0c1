"""Write checkpoints to the disk, completely or not at all, while training continues. Check their files before loading.

`search` finds the checkpoint to resume from. `manifest` and `reading` check a checkpoint's files. `folders` renames and
deletes checkpoint folders, and moves an earlier run's files away. `writing` writes the files, if possible in a thread
and from copies in memory (`writing.HostFiles`). `stop_signal` handles SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C.
"""

"""Write checkpoints to the disk, completely or not at all, if possible while training continues. Check their files.

`search` finds the checkpoint to resume from. `manifest` and `reading` check a checkpoint's files. `folders` renames and
deletes checkpoint folders, and moves an earlier run's files away. `writing` writes the files, either in a thread from
copies in memory (`writing.HostFiles`) or while training waits. `stop_signal` handles signals such as SIGTERM."""

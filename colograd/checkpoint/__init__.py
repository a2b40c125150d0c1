"""Checkpoints on disk: written whole or not at all, in parallel to training, and checked before they are loaded.

`search` finds the checkpoint to resume from. `manifest` and `reading` check its files. `folders` commits and deletes
whole folders, and knows the files of an earlier run. `writing` writes files from memory (`host_files`) in a thread, if
it may. `stop_signal` handles SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C.
"""

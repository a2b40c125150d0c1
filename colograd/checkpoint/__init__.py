"""Checkpoints on disk: written whole or not at all, beside the training, and checked before anything is loaded.

`search` finds the checkpoint to resume from, `manifest` and `reading` check its files, `folders` commits and deletes
whole folders, `writing` is the thread that writes them, from `host_files` in memory, where `background` allows
it. `node_folders` tests whether nodes share a folder, `stop_signal` notices SIGTERM.
"""

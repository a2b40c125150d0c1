"""Write checkpoints to the disk, completely or not at all, and find and check the checkpoint to resume from."""

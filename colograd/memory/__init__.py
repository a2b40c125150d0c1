"""The memory of a rank's device: planned before anything is built, measured for micro-batches, and used in turns by
sampling and training."""

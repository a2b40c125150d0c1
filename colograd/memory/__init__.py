"""The memory of a rank's device: planned before anything is built, measured for micro-batches, and lent in turns to
sampling and training."""

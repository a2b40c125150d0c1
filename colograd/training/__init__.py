"""Training on scored groups: the `Learner`, and the other parts of a `GRPOTrainer`."""

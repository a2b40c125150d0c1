"""From scored groups to a trained policy: `Learner`, and what a `GRPOTrainer` is put together from."""

"""Train the policy on scored groups (`Learner`), and prepare, evaluate and checkpoint a `GRPOTrainer`'s run."""

"""Prepare a run, train the policy on scored groups (`Learner`), evaluate it, and save checkpoints."""

"""The policy (the model to train), from groups of completions to log-probabilities of their tokens."""

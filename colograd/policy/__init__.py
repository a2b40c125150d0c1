"""The policy (the model to train), and the path from groups of completions to the log-probabilities of their tokens."""

"""Weights of single tokens in the loss, which a reward function logs."""

HOOKS: dict[str, str | tuple[str, ...]] = {"riders": "rider:TokenWeights"}

"""Weights of single completion tokens in the loss. A reward function logs the weights."""

HOOKS: dict[str, str | tuple[str, ...]] = {"riders": "rider:TokenWeights"}

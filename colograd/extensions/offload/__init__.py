"""Optimizer state, gradients or activations in host memory."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS"}

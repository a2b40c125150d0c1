"""A teacher model, whose reverse KL divergence joins the loss."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS"}

"""A penalty in the reward: the KL divergence from the reference model."""

HOOKS: dict[str, str | tuple[str, ...]] = {"loss_term": "penalty:penalty_of"}

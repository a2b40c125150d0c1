"""The divergence from the reference as a part of the reward."""

HOOKS: dict[str, str | tuple[str, ...]] = {"loss_term": "penalty:penalty_of"}

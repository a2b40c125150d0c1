"""FSDP2: weights that ranks cut by rows, and gather block by block."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "gathered_weights": "gathered:gathered_weights",
    "sharding": "strategy:FullySharded",
}

"""FSDP2 (`sharding: fsdp`): each rank has some rows of every weight, and gathers whole weights to compute."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "gathered_weights": "rows:gathered_weights",
    "sharding:fsdp": "strategy:FullySharded",
}

"""FSDP2: weights that ranks cut by rows, and gather block by block."""

HOOKS: dict[str, str | tuple[str, ...]] = {"sharding": "strategy:FullySharded"}

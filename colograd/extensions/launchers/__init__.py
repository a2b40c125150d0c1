"""Reads the sharding that accelerate's FSDP2 files and DeepSpeed's configurations request."""

HOOKS: dict[str, str | tuple[str, ...]] = {"launched": "launched:requests"}

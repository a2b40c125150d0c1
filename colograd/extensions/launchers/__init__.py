"""Reads the requested sharding from accelerate's FSDP2 files and DeepSpeed's configurations."""

HOOKS: dict[str, str | tuple[str, ...]] = {"launched": "launched:launched_settings"}

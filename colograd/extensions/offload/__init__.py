"""Optimizer state, gradients or activations in host memory."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "cheapest": "ways:cheapest",
    "left_on_device": "ways:LeftOnDevice",
    "optimizer": "adamw:host_adamw_of",
    "sharding_variant": "on_host:on_host",
}

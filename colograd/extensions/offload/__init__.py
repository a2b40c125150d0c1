"""Optimizer state, gradients or activations in host memory."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "cheapest": "ways:cheapest",
    "left_on_device": "ways:LeftOnDevice",
    "optimizer_moves": "turns:moves_of",
    "host_remedies": "ways:remedies",
    "optimizer": "adamw:host_adamw_of",
    "sharding_variant": "on_host:on_host",
}

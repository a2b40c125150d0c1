"""Optimizer state, gradient sums or layer inputs of the training in host memory, in place of GPU memory."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "cheapest": "ways:cheapest",
    "conflicts": "conflicts:CONFLICTS",
    "host_remedies": "ways:remedies",
    "left_on_device": "ways:LEFT_ON_DEVICE",
    "optimizer": "adamw:host_adamw_of",
    "optimizer_moves": "adamw:moves_of",
    "sharding_variant": "on_host:on_host",
    "training_context": "layer_inputs:inputs_of_run",
}

"""Optimizer state, gradients or activations in host memory."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "training_context": "layer_inputs:inputs_of_run",
}

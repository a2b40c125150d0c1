"""LoRA and DoRA adapters (peft): made, loaded from folders, and checked against the limits of vLLM."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "adapter": "adapters:taken_adapter",
    "adapter_weights": "weights:AdapterWeights",
    "map_adapter": "weights:map_adapter",
    "saved_adapter": "adapters:from_adapter",
    "wrap": "adapters:wrap",
}

"""LoRA and DoRA adapters of peft: creation, loading, checks of vLLM's limits, and publishing into the engine."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "adapter": "adapters:take_adapter",
    "adapter_weights": "weights:AdapterWeights",
    "map_adapter": "weights:map_adapter",
    "saved_adapter": "adapters:from_adapter",
    "wrap": "adapters:wrap",
}

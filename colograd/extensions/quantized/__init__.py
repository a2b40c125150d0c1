"""Base models quantised to 4 or 8 bits, below a trained adapter (QLoRA)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "engine_feature": "engine.layers:served_layers",
    "model_feature": "checkpoints:Quantized",
    "packed_weight": "layers:packed_weight",
    "quantization": "checkpoints:settings_of",
    "to_pack": "layers:to_pack",
    "trainer_arguments": "checkpoints:take_quantization",
}

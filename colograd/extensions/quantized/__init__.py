"""Bases of 4 or 8 bits below an adapter."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "model_feature": "model:Quantized",
    "packed_weight": "layers:packed_weight",
    "quantization": "checkpoints:settings_of",
    "to_pack": "layers:to_pack",
}

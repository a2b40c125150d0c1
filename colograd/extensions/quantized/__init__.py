"""Bases of 4 or 8 bits below an adapter."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "engine_feature": "engine.layers:served_layers",
    "packed_weight": "layers:packed_weight",
}

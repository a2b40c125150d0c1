"""Mixtures of experts: routing, the load-balancing loss, replayed routing."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "loaded_policy": "engine.lora:merged_beside_experts",
}

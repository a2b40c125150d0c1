"""Mixtures of experts: routing, the load-balancing loss, replayed routing."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "loaded_policy": "engine.lora:merged_beside_experts",
    "conversation_experts": ("engine.routed:as_written", "engine.routed:one_prompt"),
}

"""Mixtures of experts: routing metrics, load-balancing loss, and router replay."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "engine_feature": ("engine.kernels:mixture_build", "engine.routed:router_log"),
    "loaded_policy": "engine.kernels:merged_beside_experts",
    "loss_term": ("losses:balance_term", "losses:replay_term"),
    "model_feature": "model:Experts",
    "policy": "router_replay:set_up",
    "riders": "router_replay:RoutedExperts",
}

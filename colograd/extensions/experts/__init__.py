"""Mixtures of experts: routing, the load-balancing loss, replayed routing."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "policy": "router_replay:set_up",
    "loss_term": ("losses:balance_term", "losses:replay_term"),
}

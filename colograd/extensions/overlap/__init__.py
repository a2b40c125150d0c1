"""Training of finished groups while other completions are still decoded (`overlap`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "engine_feature": "engine.step_stream:step_stream",
    "notes": "rules:note",
    "round": "rounds:overlapped_round",
}

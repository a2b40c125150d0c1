"""Training of finished groups while other completions are still decoded (`overlap`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {"round": "rounds:overlapped_round", "notes": "rules:note"}

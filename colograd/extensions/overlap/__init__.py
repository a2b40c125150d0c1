"""Training of finished groups while other ranks still sample (`overlap`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {"notes": "rules:note", "round": "rounds:overlapped_round"}

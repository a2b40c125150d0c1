"""Training of finished groups while other completions are still decoded (`overlap`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {}

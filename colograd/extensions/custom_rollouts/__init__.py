"""Completions that a function or a class of the user's writes (`rollout_func`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {"source": "source:UserFeature"}

"""Setting `rollout_func`: a function or a class from the user's code generates the completions."""

HOOKS: dict[str, str | tuple[str, ...]] = {"source": "source:UserFeature"}

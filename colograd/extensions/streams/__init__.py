"""Prompts of streamed datasets, which have no length and are tokenised while they are read."""

HOOKS: dict[str, str | tuple[str, ...]] = {"prompts": "stream:prompts_of"}

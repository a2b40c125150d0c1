"""Streamed datasets: prompts without a length, tokenised while they are read."""

HOOKS: dict[str, str | tuple[str, ...]] = {"prompt_stream": "stream:PromptStream"}

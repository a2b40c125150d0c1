"""Turn prompts into scored groups of completions.

A rollout source (the vLLM engine, an extension or user code) generates the groups. Reward functions score them."""

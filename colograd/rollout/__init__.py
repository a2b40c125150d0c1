"""Turn prompts into scored groups of completions: a rollout source generates groups, and reward functions score
them."""

"""Turn prompts into scored groups of completions: `Sampler`, and `RolloutSource`, the interface of generators.

prompts -> a rollout source (vLLM, tools, an agent) generates groups -> reward functions score groups -> ScoredGroup
"""

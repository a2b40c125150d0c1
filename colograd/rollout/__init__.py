"""Turn prompts into scored groups of completions: `Sampler`, and the rollout sources that generate completions.

prompts -> a rollout source (vLLM, tools, an agent) generates groups -> reward functions score groups -> ScoredGroup
"""

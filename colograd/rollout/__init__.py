"""From prompts to scored groups: the `Sampler`, and the rollout sources that write completions for it.

prompts -> a rollout source writes groups -> reward functions score them -> ScoredGroup
"""

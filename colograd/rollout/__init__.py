"""From prompts to scored groups: `Sampler`, and the sources that write completions for it.

prompts -> a rollout source writes groups -> reward functions score them -> ScoredGroup
"""

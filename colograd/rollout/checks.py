"""Check the values that user code returns: groups, rewards and advantages. A wrong value raises ValueError."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch

from ..batch import Group, Prompt, Rollout


def checked_groups(groups: Iterable[Any], prompts: Sequence[Prompt], wanted: int | None = None) -> Generator[Group]:
    waiting = {prompt.position for prompt in prompts}
    left_out = 0 if wanted is None else len(waiting) - wanted
    try:
        for group in groups:
            if not isinstance(group, Group):
                rule = "`generate` must yield a colograd.batch.Group for each prompt"
                raise ValueError(f"The method `generate` yielded {shown(group)}. {rule}.")
            if group.position not in waiting:
                rule = "must yield exactly one group for each of its prompts, with the prompt's position"
                raise ValueError(f"The method `generate` yielded a group at position {group.position}, but {rule}.")
            waiting.remove(group.position)
            if problem := _problem_of(group.rollouts):
                raise ValueError(f"`generate`, prompt {group.position}: {problem}")
            yield group
    finally:
        if hasattr(groups, "close"):
            groups.close()
    if len(waiting) != left_out:
        rule = "must yield one group, with at least one completion, for each prompt"
        number = f"no group for {len(waiting) - left_out} of {len(prompts)} prompts"
        raise ValueError(f"The method `generate` yielded {number} (first position: {min(waiting)}), but {rule}.")


def _problem_of(rollouts: Sequence[Any]) -> str:
    for index, rollout in enumerate(rollouts):
        if not isinstance(rollout, Rollout):
            return f"rollout {index} is {shown(rollout)}. A rollout must be a colograd.batch.Rollout."
        length = len(rollout.completion_ids)
        if not length or not rollout.input.ids:
            return f"rollout {index} has an empty prompt or completion. Both need at least one token."
        for name, value in (("sampler_logprobs", rollout.sampler_logprobs), ("sampled", rollout.sampled)):
            if not isinstance(value, torch.Tensor) or value.shape != (length,):
                rule = f"must be a tensor with one entry per completion token: {length}."
                return f"{name} of rollout {index} is {shown(value)}, but {rule}"
    return "" if rollouts else "the group has no rollouts. A group needs at least one rollout."


def checked_rewards(rewards: Any, group: Group, functions: int) -> torch.Tensor:
    wanted = (len(group.rollouts), functions)
    if not isinstance(rewards, torch.Tensor) or tuple(rewards.shape) != wanted:
        rule = f"a tensor of shape [completions, reward functions] = {list(wanted)}, with NaN for no reward"
        raise ValueError(f"The method `score` returned {shown(rewards)}, but must return {rule}.")
    if rewards.float().isinf().any():
        raise ValueError(
            "The method `score` returned an infinite reward. Rewards must be finite, or NaN for no reward."
        )
    return rewards.float()


def checked_advantages(advantages: Any, group: Group) -> torch.Tensor:
    completions = len(group.rollouts)
    tokens = sum(len(rollout.completion_ids) for rollout in group.rollouts)
    if not isinstance(advantages, torch.Tensor) or tuple(advantages.shape) not in ((completions,), (tokens,)):
        rule = f"a tensor with one entry per completion or per completion token: [{completions}] or [{tokens}]"
        raise ValueError(f"The method `compute_advantages` returned {shown(advantages)}, but must return {rule}.")
    if not advantages.float().isfinite().all():
        remedy = "Return 0 to leave a completion out of training. The trainer's method `combine` ignores NaN rewards."
        raise ValueError(f"The method `compute_advantages` returned an advantage that isn't finite. {remedy}")
    return advantages.float()


def shown(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"

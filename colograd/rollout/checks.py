"""Checks of replaced stages, which may return anything: each check raises a ValueError."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch

from ..batch import Group, Prompt, Rollout


def checked_groups(groups: Iterable[Any], prompts: Sequence[Prompt], wanted: int | None = None) -> Generator[Group]:
    """Check and pass on the groups that ``generate`` yields: one `Group` per prompt, or for ``wanted`` of the prompts.
    Closing this generator closes ``groups``."""
    waiting = {prompt.position for prompt in prompts}
    left_out = 0 if wanted is None else len(waiting) - wanted
    try:
        for group in groups:
            if not isinstance(group, Group):
                raise ValueError(
                    f"generate yielded {shown(group)}, but must yield a colograd.batch.Group for each prompt."
                )
            if group.position not in waiting:
                raise ValueError(
                    f"generate yielded a group at position {group.position}, but must yield exactly one for each of "
                    "its prompts: keep the prompt's position (and merge the groups of one prompt)."
                )
            waiting.remove(group.position)
            where = f"generate, prompt {group.position}"
            if not group.rollouts:
                raise ValueError(f"{where}: the group has no rollouts, but needs at least one: keep one.")
            for index, rollout in enumerate(group.rollouts):
                if not isinstance(rollout, Rollout):
                    raise ValueError(
                        f"{where}: rollout {index} is {shown(rollout)}, but must be a colograd.batch.Rollout."
                    )
                length = len(rollout.completion_ids)
                if not length or not rollout.input.ids:
                    raise ValueError(
                        f"{where}: rollout {index} has no tokens, but needs at least one in prompt and completion."
                    )
                for name in ("sampler_logprobs", "sampled"):
                    value = getattr(rollout, name)
                    if not isinstance(value, torch.Tensor) or value.shape != (length,):
                        raise ValueError(
                            f"{where}: {name} of rollout {index} is {shown(value)}, but must be a tensor with one "
                            f"entry for each of its {length} completion tokens."
                        )
            yield group
    finally:
        if hasattr(groups, "close"):
            groups.close()
    if len(waiting) != left_out:
        raise ValueError(
            f"generate yielded no group for {len(waiting) - left_out} of {len(prompts)} prompts (the first at position "
            f"{min(waiting)}), but must yield one for each: keep at least one completion."
        )


def checked_rewards(rewards: Any, group: Group, functions: int) -> torch.Tensor:
    """Return the rewards that ``score`` returned as [G, R] float32, and check that none is infinite."""
    wanted = (len(group.rollouts), functions)
    if not isinstance(rewards, torch.Tensor) or tuple(rewards.shape) != wanted:
        raise ValueError(
            f"score returned {shown(rewards)}, but must return a tensor [completions, reward functions] = "
            f"{list(wanted)}: one column for each of reward_funcs, NaN where one has no opinion."
        )
    if rewards.float().isinf().any():
        raise ValueError("score returned an infinite reward, but rewards are finite, or NaN for no opinion.")
    return rewards.float()


def checked_advantages(advantages: Any, group: Group) -> torch.Tensor:
    """Return the advantages of ``compute_advantages`` as [G] or [sum C] float32, and check that all are finite."""
    completions = len(group.rollouts)
    tokens = sum(len(rollout.completion_ids) for rollout in group.rollouts)
    if not isinstance(advantages, torch.Tensor) or tuple(advantages.shape) not in ((completions,), (tokens,)):
        raise ValueError(
            f"compute_advantages returned {shown(advantages)}, but must return a tensor with one entry per completion "
            f"([{completions}]) or one per completion token ([{tokens}])."
        )
    if not advantages.float().isfinite().all():
        raise ValueError(
            "compute_advantages returned an advantage that isn't finite: use 0 for a completion that isn't to be "
            "trained on (rewards are NaN where a function has no opinion; `combine` leaves these out)."
        )
    return advantages.float()


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"

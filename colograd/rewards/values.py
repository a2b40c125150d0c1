"""Check the values that reward functions log, store rewards of single turns, and sum rewards over functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..batch import Group, Logged, Rollout
from ..runtime.registry import hooks, require
from .calling import PARTS
from .functions import RewardError, RewardFunction

ROUNDING = 4 * torch.finfo(torch.float32).eps  # Largest relative difference of two equal sums of float32 rewards.
# Names of the trainer's metrics (`OWN_METRICS`), and their prefixes before a slash (`OWN_FAMILIES`).
OWN_METRICS = (
    "loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "step_time", "entropy", "kl", "reward",
    "reward_std", "frac_reward_zero_std",
)  # fmt: skip
OWN_FAMILIES = (
    "carry_over",
    "clip_ratio",
    "completions",
    "curriculum",
    "dynamic_sampling",
    "sampling",
    "time",
    "tools",
    "train",
)


def check_log(
    reward: RewardFunction,
    position: int,
    rollouts: Sequence[Rollout],
    columns: Mapping[str, Sequence[Any]],
    metrics: Mapping[str, Any],
) -> None:
    """Raise a `RewardError` if ``columns`` or ``metrics`` that a reward function logged for ``rollouts`` are wrong."""
    fail = functools.partial(RewardError, reward.name, position)
    for name, values in columns.items():
        if len(values) != len(rollouts):
            raise fail(
                None,
                f"the function logged {len(values)} values in the column {name!r} for {len(rollouts)} completions. "
                "Pass exactly one value per completion to log_extra, with None for a completion without a value.",
            )
    for name in metrics:
        if name in OWN_METRICS or name.partition("/")[0] in OWN_FAMILIES:
            raise fail(None, f"the function logged the metric {name!r}, a name of the trainer's metrics: rename it.")
    if "token_weights" in columns:  # This column needs the extension `token_weights`.
        require("token_weights", f"the column token_weights, which {reward.name} logs,", "log no such column")
    for kind in (kind for kind in hooks("riders") if kind.COLUMN in columns):
        for index, (rollout, value) in enumerate(zip(rollouts, columns[kind.COLUMN], strict=True)):
            try:
                _ = None if value is None else kind.from_json(value, rollout)
            except ValueError as error:
                raise fail(index, f"it logged {kind.COLUMN} of {error}") from None


def with_parts(group: Group, of_parts: Mapping[str, Sequence[Any]]) -> Group:
    """Return the group with rewards of single turns stored in its rollouts' ``columns``, in place of present ones.
    ``of_parts`` maps the name of a reward function to a list [G], for each completion its turns' rewards or None."""
    if not of_parts and not any(PARTS in rollout.columns for rollout in group.rollouts):
        return group
    rollouts = []
    for index, rollout in enumerate(group.rollouts):
        columns = {name: value for name, value in rollout.columns.items() if name != PARTS}
        if own := {name: parts for name, of_all in of_parts.items() if (parts := of_all[index]) is not None}:
            columns[PARTS] = own
        rollouts.append(dataclasses.replace(rollout, columns=columns))
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def with_logged_riders(group: Group, logged: Logged) -> Group:
    """Return the group with riders (data of extensions, such as token weights) that reward functions have logged for
    its completions by `log_extra`."""
    for kind in (kind for kind in hooks("riders") if kind.COLUMN in logged.columns):
        pairs = zip(group.rollouts, logged.columns[kind.COLUMN], strict=True)
        riders = ((one, () if value is None else (kind.from_json(value, one),)) for one, value in pairs)
        group = dataclasses.replace(group, rollouts=tuple(one.carrying(*own) for one, own in riders))
    return group


def weighted_sum(rewards: torch.Tensor, weights: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """Sum a group's rewards [G, R], weighted by R weights, over the functions that didn't abstain (NaN).

    If the sums of a group differ only by float32 rounding (0.6 + 0.1 and 0.7), all become equal. Otherwise a group of
    equal rewards would train on rounding errors, because advantages are divided by the standard deviation.

    Returns:
        Sums [G] float32, NaN for a completion where all functions abstained.
    """
    weights_R = torch.as_tensor(weights, dtype=torch.float32, device=rewards.device)
    terms = rewards.double() * weights_R.double()
    total = terms.nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), math.nan)
    judged = total[~total.isnan()]
    if terms.shape[1] > 1 and len(judged):
        rounding = ROUNDING * terms.abs().nansum(dim=1).max()
        if judged.max() - judged.min() <= rounding:
            total = torch.where(total.isnan(), total, judged.mean())
    return total.float()

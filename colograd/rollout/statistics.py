"""Metrics of the completions of an optimizer step or an evaluation, computed from the values of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..batch import FinishReason, ScoredGroup
from ..losses.advantages import group_std
from ..policy.packing import loss_tokens
from ..runtime.registry import hooks

# Prefixes of the names of counts of a whole round. Each step of the round reports an equal part of such a count.
DIVIDED = ("tools/", "agent/", "carry_over/ages")

Combine = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class RolloutStatistics:
    lengths: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)  # Rewards: [completion][reward function].
    totals: list[float] = field(default_factory=list)  # Combined reward of each completion. NaN: no reward.
    flat_groups: list[bool] = field(default_factory=list)
    prompt_tokens: int = 0
    loss_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # Metrics to report as sums over ranks.
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)  # Metric -> (sum, number) of logged values.
    maxima: dict[str, float] = field(default_factory=dict)  # Metrics to report as maxima over ranks.
    distinct: int = 0  # Number of different completions in each group, summed over groups.
    notes: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Iterable[ScoredGroup], combine: Combine, mask_truncated: bool) -> RolloutStatistics:
        """Compute the statistics of groups. ``combine`` converts rewards [G, R] to totals [G]."""
        found = cls()
        for group in groups:
            totals = combine(group.rewards.clone())  # An overridden `combine` may change this copy in place.
            for rollout in group.group.rollouts:
                found.lengths.append(int(rollout.sampled.sum()))
                found.ended.append(rollout.finish_reason is FinishReason.STOP)
                found.prompt_tokens += len(rollout.input)
                found.loss_tokens += int(loss_tokens(rollout, mask_truncated).sum())
                if unscored := int((rollout.sampled & rollout.sampler_logprobs.isnan()).sum()):
                    found.counts["sampling/unscored_tokens"] += unscored
                for rider in rollout.riders:
                    found._add(*rider.statistics(rollout), {})
            found.distinct += len({rollout.completion_ids.tobytes() for rollout in group.group.rollouts})
            found.rewards += group.rewards.tolist()
            found.totals += totals.tolist()
            found.flat_groups.append(bool(group_std(totals) < 1e-8))
            found._add({}, {}, group.logged.metrics)
        return found

    @classmethod
    def join(cls, parts: Iterable[RolloutStatistics]) -> RolloutStatistics:
        whole = cls()
        for part in parts:
            for name in {each.name for each in fields(cls)} - {"counts", "maxima", "logged"}:
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            whole._add(part.counts, part.maxima, part.logged)
        return whole

    def _add(self, sums: Mapping[str, float], maxima: Mapping[str, float], logged: Mapping[str, Any]) -> None:
        self.counts.update(sums)
        self.maxima |= {name: max(own, self.maxima.get(name, own)) for name, own in maxima.items()}
        for name, (total, number) in logged.items():
            before = self.logged.get(name, (0.0, 0.0))
            self.logged[name] = (before[0] + total, before[1] + number)

    def metrics(self, reward_names: Sequence[str]) -> dict[str, float]:
        lengths = torch.tensor(self.lengths, dtype=torch.float32)
        ended = torch.tensor(self.ended, dtype=torch.bool)
        result = {name: total / number for name, (total, number) in self.logged.items()}
        if len(lengths):
            result |= _spread("completions/{}_length", lengths)
            result |= _spread("completions/{}_terminated_length", lengths[ended])
            result["completions/clipped_ratio"] = 1.0 - float(ended.float().mean())
            result["completions/duplicates"] = 1.0 - self.distinct / len(lengths)
        rewards = torch.tensor(self.rewards, dtype=torch.float32).view(len(self.rewards), len(reward_names))
        for name, column in zip(reward_names, rewards.unbind(1), strict=True):
            judged = column[~column.isnan()]
            if len(judged):
                result[f"rewards/{name}/mean"] = float(judged.mean())
                result[f"rewards/{name}/std"] = float(group_std(column))
            result[f"rewards/{name}/abstained"] = float(column.isnan().sum())
        totals = torch.tensor(self.totals, dtype=torch.float32)
        if (~totals.isnan()).any():
            result["reward"] = float(totals.nanmean())
            result["reward_std"] = float(group_std(totals))
        result |= {name: float(value) for name, value in self.counts.items()}
        seconds, idle = (result.pop(f"rollout/{name}", 0.0) for name in ("seconds", "idle_seconds"))
        if seconds:
            result["rollout/idle_share"] = idle / seconds
        for derive in hooks("derived_metrics"):
            derive(self, result)
        if self.flat_groups and reward_names:
            result["frac_reward_zero_std"] = sum(self.flat_groups) / len(self.flat_groups)
        return result


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    found = {"mean": values.mean(), "min": values.min(), "max": values.max()} if len(values) else {}
    return {name.format(key): float(value) for key, value in found.items()}

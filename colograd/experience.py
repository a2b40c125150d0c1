"""Prompts -> StepBatches: generate, score, advantage, pack.

A round takes the prompts of one or more optimizer steps, samples them all in one queue, scores each group as it
leaves the engine, and cuts the groups into one `StepBatch` per step. What depends on a rank's luck (token counts,
errors) is exchanged once, at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .advantages import group_std
from .balance import balance
from .batch import FinishReason, Group, Prompt, ScoredGroup, StepBatch
from .metrics import PhaseTimes
from .packing import PackingRules, has_signal, loss_tokens, pack_step
from .ranks import gather, together


class Stages(Protocol):
    """The stages that a subclass of the trainer may replace."""

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[Group]: ...

    def begin_score(self, groups: Sequence[Group]) -> Callable[[], torch.Tensor]: ...

    def take_counts(self) -> dict[str, float]: ...

    def combine(self, rewards: torch.Tensor) -> torch.Tensor: ...

    def compute_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True)
class RolloutStatistics:
    """What one rank's groups say, in plain lists: small, and exact when joined over ranks."""

    lengths: list[int] = field(default_factory=list)  # tokens per completion
    ended: list[bool] = field(default_factory=list)  # False: truncated
    rewards: list[list[float]] = field(default_factory=list)  # [completion][function]
    totals: list[float] = field(default_factory=list)  # weighted sums, NaN: nobody judged it
    flat_groups: list[bool] = field(default_factory=list)  # no reward difference
    prompt_tokens: int = 0
    loss_tokens: int = 0
    packed_tokens: int = 0  # through the model in one forward
    micro_batches: int = 0
    moved_groups: int = 0  # trained here and sampled on another rank
    counts: Counter[str] = field(default_factory=Counter)  # further metrics that add up

    def add(self, group: ScoredGroup, totals: torch.Tensor, mask_truncated: bool) -> None:
        for rollout in group.group.rollouts:
            self.lengths.append(len(rollout.completion_ids))
            self.ended.append(rollout.finish_reason is FinishReason.STOP)
            self.prompt_tokens += len(rollout.prompt_ids)
            self.loss_tokens += int(loss_tokens(rollout, mask_truncated).sum())
        self.rewards += group.rewards.tolist()
        self.totals += totals.tolist()
        self.flat_groups.append(bool(group_std(totals) < 1e-8))

    @classmethod
    def of(cls, groups: Iterable[tuple[ScoredGroup, torch.Tensor]], mask_truncated: bool) -> RolloutStatistics:
        """The statistics of one step's groups, with their weighted reward sums."""
        found = cls()
        for group, totals in groups:
            found.add(group, totals, mask_truncated)
        return found

    @classmethod
    def join(cls, parts: Iterable[RolloutStatistics]) -> RolloutStatistics:
        """The statistics of all ranks together."""
        whole = cls()
        for part in parts:
            whole.lengths += part.lengths
            whole.ended += part.ended
            whole.rewards += part.rewards
            whole.totals += part.totals
            whole.flat_groups += part.flat_groups
            whole.prompt_tokens += part.prompt_tokens
            whole.loss_tokens += part.loss_tokens
            whole.packed_tokens += part.packed_tokens
            whole.micro_batches += part.micro_batches
            whole.moved_groups += part.moved_groups
            whole.counts.update(part.counts)
        return whole

    def metrics(self, reward_names: Sequence[str]) -> dict[str, float]:
        """TRL's metrics of a batch of completions."""
        lengths = torch.tensor(self.lengths, dtype=torch.float32)
        ended = torch.tensor(self.ended, dtype=torch.bool)
        result: dict[str, float] = {}
        if len(lengths):
            result |= _spread("completions/{}_length", lengths)
            result |= _spread("completions/{}_terminated_length", lengths[ended])
            result["completions/clipped_ratio"] = 1.0 - float(ended.float().mean())
        rewards = torch.tensor(self.rewards, dtype=torch.float32).view(-1, len(reward_names))
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
        if self.flat_groups:
            result["frac_reward_zero_std"] = sum(self.flat_groups) / len(self.flat_groups)
        return result


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, minimum and maximum; nothing for no values."""
    if not len(values):
        return {}
    found = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {name.format(key): float(value) for key, value in found.items()}


def roll_out(
    stages: Stages, prompts: Sequence[Prompt], times: PhaseTimes, one_call: bool = False
) -> list[tuple[ScoredGroup, torch.Tensor]]:
    """Sample and score: groups with their weighted reward sums [G], in the order of the prompts.

    A group's scoring begins when it leaves the engine, which then goes on decoding the others. What runs in this
    process does so between two engine steps. Both that and the waiting for the rest are charged to ``reward``.

    Args:
        one_call: score all groups together, when the last one is there.
    """
    groups: list[Group] = []
    begun: list[tuple[list[Group], Callable[[], torch.Tensor]]] = []
    with times.phase("generate"):
        for group in stages.generate(prompts):
            groups.append(group)
            if not one_call:
                started = time.perf_counter()
                begun.append(([group], stages.begin_score([group])))
                times.move("generate", "reward", time.perf_counter() - started)
    done: list[tuple[ScoredGroup, torch.Tensor]] = []
    with times.phase("reward"):
        if one_call:
            groups.sort(key=lambda group: group.position)
            begun.append((groups, stages.begin_score(groups)))
        for of_call, finish in begun:
            parts = finish().split([len(group.rollouts) for group in of_call])
            for group, rewards in zip(of_call, parts, strict=True):
                done.append((ScoredGroup(group, rewards, torch.zeros(len(group.rollouts))), stages.combine(rewards)))
    # Groups finish in any order: everything after this point must not depend on it.
    return sorted(done, key=lambda pair: pair[0].group.position)


def collect(
    stages: Stages,
    steps: Sequence[Sequence[Prompt]],
    rules: PackingRules,
    reward_names: Sequence[str],
    times: PhaseTimes,
    one_call: bool = False,
) -> tuple[list[StepBatch], list[list[ScoredGroup]]]:
    """One round: the prompts of each optimizer step on this rank -> one `StepBatch` each, and its groups for the log.

    Raises:
        Exception: what a stage raised, on every rank (see `together`).
    """
    prompts = [prompt for step in steps for prompt in step]
    with together("the rollout"):
        pairs = roll_out(stages, prompts, times, one_call)
        with times.phase("pack"):
            scored = [
                (ScoredGroup(g.group, g.rewards, stages.compute_advantages(g.group, g.rewards)), totals)
                for g, totals in pairs
            ]
        by_position = {group.group.position: (group, totals) for group, totals in scored}
        of_steps = [[by_position[prompt.position] for prompt in step] for step in steps]
        with times.phase("pack"):
            trained = [_trained(of_step, rules) for of_step in of_steps]
            locals_ = [RolloutStatistics.of(of_step, rules.mask_truncated) for of_step in of_steps]
            locals_[0].counts.update(stages.take_counts())
    batches = []
    for index, (own, local) in enumerate(zip(trained, locals_, strict=True)):
        with times.phase("pack"):
            groups = own
            if rules.balance_ranks:
                groups, local.moved_groups = balance(own, rules.pair_cost, rules.share_prompts)
            micro_batches = pack_step(groups, rules)
        local.packed_tokens = sum(row.input_ids.numel() for row in micro_batches)
        local.micro_batches = len(micro_batches)
        whole = RolloutStatistics.join(gather(local))
        metrics = whole.metrics(reward_names)
        metrics["train/packed_tokens"] = float(whole.packed_tokens)
        metrics["train/micro_batches"] = float(whole.micro_batches)
        metrics["train/moved_groups"] = float(whole.moved_groups)
        metrics["train/sampled_tokens"] = float(sum(whole.lengths))
        metrics["train/rollout_tokens"] = float(whole.prompt_tokens + sum(whole.lengths))
        batches.append(
            StepBatch(micro_batches, whole.loss_tokens, len(whole.lengths), metrics, index == 0, tuple(groups))
        )
    return batches, [[group for group, _ in of_step] for of_step in of_steps]


def _trained(groups: Sequence[tuple[ScoredGroup, torch.Tensor]], rules: PackingRules) -> list[ScoredGroup]:
    """The groups that are packed. Those without a reward difference carry no gradient: they count in the denominators
    and the metrics, and are not trained on."""
    return [group for group, _ in groups if has_signal(group) or not rules.skip_without_signal]

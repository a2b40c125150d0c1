"""Prompts -> StepBatches: generate, score, advantage, pack.

A round takes the prompts of one or more optimizer steps, samples them all in one queue, scores each group as it
leaves the engine, and cuts the groups into one `StepBatch` per step. What depends on a rank's luck (token counts,
errors) is exchanged once, at the end.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..batch import FinishReason, Group, Logged, Prompt, ScoredGroup, StepBatch
from ..losses.advantages import divided, group_std, step_std
from ..parallel.balance import balance
from ..parallel.ranks import gather, together
from ..policy.packing import PackingRules, has_signal, loss_tokens, pack_step
from ..reporting.metrics import PhaseTimes
from .stage_checks import checked_advantages, checked_groups


class Pending(Protocol):
    """Rewards on their way."""

    def done(self) -> bool: ...

    def cancel(self) -> None: ...

    def result(self) -> torch.Tensor: ...


class Stages(Protocol):
    """The stages that a subclass of the trainer may replace."""

    def generate(self, prompts: Sequence[Prompt]) -> Generator[Group]: ...

    def begin_score(self, groups: Sequence[Group]) -> Pending: ...

    def more_prompts(self, drawn: int, count: int) -> list[Prompt]: ...

    def take_counts(self) -> dict[str, float]: ...

    def take_logged(self, group: Group) -> Logged: ...

    def combine(self, rewards: torch.Tensor) -> torch.Tensor: ...

    def compute_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True)
class RolloutStatistics:
    """What one rank's groups say, in plain lists: small, and exact when joined over ranks."""

    lengths: list[int] = field(default_factory=list)  # sampled tokens per completion
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
    logged: dict[str, list[float]] = field(default_factory=dict)  # sum and number of what rewards log, by metric

    def add(self, group: ScoredGroup, totals: torch.Tensor, mask_truncated: bool) -> None:
        for rollout in group.group.rollouts:
            self.lengths.append(int(rollout.sampled.sum()))
            self.ended.append(rollout.finish_reason is FinishReason.STOP)
            self.prompt_tokens += len(rollout.prompt_ids)
            self.loss_tokens += int(loss_tokens(rollout, mask_truncated).sum())
            if unscored := int((rollout.sampled & rollout.sampler_logprobs.isnan()).sum()):
                self.counts["sampling/unscored_tokens"] += unscored
        self.rewards += group.rewards.tolist()
        self.totals += totals.tolist()
        self.flat_groups.append(bool(group_std(totals) < 1e-8))
        self._log(group.logged.metrics)

    def _log(self, metrics: Mapping[str, Sequence[float]]) -> None:
        for name, (total, number) in metrics.items():
            entry = self.logged.setdefault(name, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + total, entry[1] + number

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
            whole._log(part.logged)
        return whole

    def metrics(self, reward_names: Sequence[str]) -> dict[str, float]:
        """TRL's metrics of a batch of completions, and the means of those that reward functions log."""
        lengths = torch.tensor(self.lengths, dtype=torch.float32)
        ended = torch.tensor(self.ended, dtype=torch.bool)
        result = {name: total / number for name, (total, number) in self.logged.items()}
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
        if "tools/calls" in self.counts:
            calls = self.counts["tools/calls"]
            result["tools/call_frequency"] = calls / max(len(self.lengths), 1)
            result["tools/failure_frequency"] = self.counts["tools/failures"] / calls if calls else 0.0
        if self.flat_groups:
            result["frac_reward_zero_std"] = sum(self.flat_groups) / len(self.flat_groups)
        return result


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, minimum and maximum; nothing for no values."""
    if not len(values):
        return {}
    found = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {name.format(key): float(value) for key, value in found.items()}


Scored = tuple[ScoredGroup, torch.Tensor]  # a group with its advantages, and its weighted reward sums [G]


def roll_out(
    stages: Stages, prompts: Sequence[Prompt], times: PhaseTimes, one_call: bool = False, enough: int | None = None
) -> list[Scored]:
    """Sample and score: the groups in the order of the prompts, whose positions ascend.

    A group's scoring begins when it leaves the engine, which then goes on decoding the others. What runs in this
    process does so between two engine steps. Both that and the waiting for the rest are charged to ``reward``.

    Args:
        one_call: score all groups together, when the last one is there.
        enough: groups with a reward difference after which no further prompt is needed: what is in flight is aborted,
            and the list ends with the last of them. Which groups these are depends on the order of the prompts alone,
            and not on what finishes first.
    """
    if one_call:
        with times.phase("generate"):
            whole = sorted(checked_groups(stages.generate(prompts), prompts), key=lambda group: group.position)
        with times.phase("reward"):
            rewards = stages.begin_score(whole).result().split([len(group.rollouts) for group in whole])
            return _first([_scored(stages, *pair) for pair in zip(whole, rewards, strict=True)], enough)
    begun: dict[int, tuple[Group, Pending]] = {}
    known: list[Scored] = []  # of the first prompts, as far as all before are known too
    order = [prompt.position for prompt in prompts]

    signals: list[bool] = []  # of those

    def is_enough() -> bool:
        return enough is not None and sum(signals) >= enough

    def advance(wait: bool) -> None:
        started = time.perf_counter()
        for position in order[len(known) :]:
            if is_enough() or position not in begun or not (wait or begun[position][1].done()):
                break
            group, pending = begun.pop(position)
            known.append(_scored(stages, group, pending.result()))
            signals.append(has_signal(known[-1][0]))
        if not wait:
            times.move("generate", "reward", time.perf_counter() - started)

    try:
        # Closing aborts what is in flight: when there is enough, and when a reward fails.
        with times.phase("generate"), contextlib.closing(checked_groups(stages.generate(prompts), prompts)) as groups:
            for group in groups:
                started = time.perf_counter()
                begun[group.position] = (group, stages.begin_score([group]))
                times.move("generate", "reward", time.perf_counter() - started)
                if enough is not None:
                    advance(wait=False)
                    if is_enough():
                        break
        with times.phase("reward"):
            advance(wait=True)
    finally:
        for _, pending in begun.values():  # of groups that turned out not to be needed
            pending.cancel()
    return known


def _scored(stages: Stages, group: Group, rewards: torch.Tensor) -> Scored:
    advantages = checked_advantages(stages.compute_advantages(group, rewards), group)
    return ScoredGroup(group, rewards, advantages, stages.take_logged(group)), stages.combine(rewards)


def _first(pairs: Sequence[Scored], enough: int | None) -> list[Scored]:
    """Up to the ``enough``-th group with a signal."""
    found, taken = 0, []
    for pair in pairs:
        if enough is not None and found >= enough:
            break
        taken.append(pair)
        found += has_signal(pair[0])
    return taken


def draw(
    stages: Stages, steps: Sequence[Sequence[Prompt]], times: PhaseTimes, one_call: bool, max_rounds: int
) -> tuple[list[list[Scored]], list[list[Scored]]]:
    """A round's groups: those of each optimizer step, and beside them all that were sampled for it.

    With ``max_rounds`` (dynamic sampling, arXiv 2503.14476, section 3.2) a step takes only groups with a reward
    difference, and further prompts are drawn, at most so many times, until it has its number of them. They come in the
    order in which they were drawn, so a step's groups need not be those of its own prompts.
    """
    prompts = [prompt for step in steps for prompt in step]
    if not max_rounds:
        by_position = {pair[0].group.position: pair for pair in roll_out(stages, prompts, times, one_call)}
        of_steps = [[by_position[prompt.position] for prompt in step] for step in steps]
        return of_steps, of_steps
    wanted, sampled = len(prompts), roll_out(stages, prompts, times, one_call)
    for _ in range(max_rounds):
        found = sum(has_signal(scored) for scored, _ in sampled)
        if found >= wanted:
            break
        # As many as will probably do, at most ten times those that are missing.
        count = math.ceil((wanted - found) / max(found / len(sampled), 0.1))
        more = stages.more_prompts(len(sampled) - wanted, count)
        sampled += roll_out(stages, more, times, one_call, enough=wanted - found)
    kept = [pair for pair in sampled if has_signal(pair[0])][:wanted]
    sizes = [len(step) for step in steps]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    shares = _shares(sampled, len(steps))
    return [kept[start : start + size] for start, size in zip(starts, sizes, strict=True)], shares


def _shares(sampled: Sequence[Scored], steps: int) -> list[list[Scored]]:
    """What was sampled, divided among the round's steps for their metrics."""
    return [list(sampled[index::steps]) for index in range(steps)]


def collect(
    stages: Stages,
    steps: Sequence[Sequence[Prompt]],
    rules: PackingRules,
    reward_names: Sequence[str],
    times: PhaseTimes,
    one_call: bool = False,
    max_rounds: int = 0,
    step_scores: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[list[StepBatch], list[list[ScoredGroup]]]:
    """One round: the prompts of each optimizer step on this rank -> one `StepBatch` each, and its groups for the log.

    Args:
        step_scores: where advantages are scaled over the step: a group's rewards to what they are scaled by the
            deviation of (`Estimator.step_scores`).

    Raises:
        Exception: what a stage raised, on every rank (see `together`).
    """
    with together("the rollout"):
        of_steps, sampled = draw(stages, steps, times, one_call, max_rounds)
        with times.phase("pack"):
            trained = [_trained(of_step, rules) for of_step in of_steps]
            scores = (
                [[step_scores(group.rewards) for group, _ in of_step] for of_step in of_steps] if step_scores else []
            )
            locals_ = [RolloutStatistics.of(of_step, rules.mask_truncated) for of_step in of_steps]
            of_sampled = [RolloutStatistics.of(of_step, rules.mask_truncated) for of_step in sampled]
            _count(of_sampled, stages.take_counts())
            if max_rounds:
                for kept, all_ in zip(of_steps, sampled, strict=True):
                    of_sampled[0].counts["dynamic_sampling/prompts"] += len(all_)
                    of_sampled[0].counts["dynamic_sampling/groups"] += len(kept)
    logged = [[group for group, _ in of_step] for of_step in sampled]
    if step_scores:
        trained, logged = _scaled(of_steps, trained, logged, [step_std(of_step) for of_step in scores])
    batches = []
    for index, (own, local, drawn) in enumerate(zip(trained, locals_, of_sampled, strict=True)):
        with times.phase("pack"):
            groups = own
            if rules.balance_ranks:
                groups, local.moved_groups = balance(own, rules.pair_cost, rules.share_prompts)
            micro_batches = pack_step(groups, rules)
        local.packed_tokens = sum(row.input_ids.numel() for row in micro_batches)
        local.micro_batches = len(micro_batches)
        parts = gather((local, drawn))
        whole = RolloutStatistics.join(part for part, _ in parts)
        everything = RolloutStatistics.join(part for _, part in parts)
        metrics = everything.metrics(reward_names)
        metrics["train/packed_tokens"] = float(whole.packed_tokens)
        metrics["train/micro_batches"] = float(whole.micro_batches)
        metrics["train/moved_groups"] = float(whole.moved_groups)
        metrics["train/sampled_tokens"] = float(sum(everything.lengths))
        # TRL's `num_tokens` counts the same: prompts and what the model wrote, not what tools told it.
        metrics["train/rollout_tokens"] = float(everything.prompt_tokens + sum(everything.lengths))
        batches.append(
            StepBatch(micro_batches, whole.loss_tokens, len(whole.lengths), metrics, index == 0, tuple(groups))
        )
    return batches, logged


def unjudged(steps: Sequence[Sequence[ScoredGroup]]) -> str:
    """A line on the first completion for which every reward function abstained; empty if there is none."""
    for group in (group for groups in steps for group in groups):
        nobody = group.rewards.isnan().all(dim=1).nonzero()
        if len(nobody):
            row = {name: value for name, value in group.group.example.items() if name != "prompt"}
            return (
                f"rewards: every reward function abstained for completion {int(nobody[0])} of the prompt "
                f"{reprlib.repr(group.group.example.get('prompt'))} with {reprlib.repr(row)}: it isn't trained on "
                "(said once; `rewards/<name>/abstained` counts on)"
            )
    return ""


def _scaled(
    of_steps: Sequence[Sequence[Scored]],
    trained: Sequence[Sequence[ScoredGroup]],
    logged: Sequence[Sequence[ScoredGroup]],
    stds: Sequence[float],
) -> tuple[list[list[ScoredGroup]], list[list[ScoredGroup]]]:
    """What each step trains, and what is logged beside it, with advantages divided by the deviation of the step that
    trains a group, or would have."""
    own = {group.group.position: std for of_step, std in zip(of_steps, stds, strict=True) for group, _ in of_step}
    pairs = [*zip(trained, stds, strict=True)], [*zip(logged, stds, strict=True)]
    scaled_trained, scaled_logged = (
        [[divided(group, own.get(group.group.position, std)) for group in part] for part, std in of_both]
        for of_both in pairs
    )
    return scaled_trained, scaled_logged


def _count(steps: Sequence[RolloutStatistics], counts: Mapping[str, float]) -> None:
    """A round's counts: those of rewards in its first step; of tool calls, which are no step's, each has its share."""
    for name, number in counts.items():
        among = steps if name.startswith("tools/") else steps[:1]
        for part in among:
            part.counts[name] += number / len(among)  # type: ignore[assignment]


def _trained(groups: Sequence[tuple[ScoredGroup, torch.Tensor]], rules: PackingRules) -> list[ScoredGroup]:
    """The groups that are packed. Those without a reward difference carry no gradient: they count in the denominators
    and the metrics, and are not trained on."""
    return [group for group, _ in groups if has_signal(group) or not rules.skip_without_signal]

"""`Sampler`: generates completions for prompts and scores them, for training and evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import Group, Prompt, SampledStep, ScoredGroup
from ..config import GRPOConfig
from ..engine.protocol import Engine, stepping
from ..engine.sampling import Sampling
from ..losses.advantages import AdvantageEstimator, scale_over_steps
from ..memory.device_turns import DeviceTurns
from ..parallel.ranks import on_all_ranks, world_size
from ..reporting.events import Events
from ..rewards import Ready, Scorer, Scoring
from ..runtime import registry
from .checks import checked_advantages, checked_rewards
from .rounds import PlainRound, Steps, unscored
from .stages import PendingRewards, RolloutSource, Stages
from .statistics import DIVIDED, RolloutStatistics
from .texts import has_parser, with_messages, with_prompt_text


@dataclass(frozen=True, slots=True)
class SampledRound:
    steps: tuple[SampledStep, ...]
    statistics: tuple[RolloutStatistics, ...]


@dataclass(eq=False)
class Sampler:
    """Samples groups of completions, scores them and computes advantages.

    The groups are on the first rank of each vLLM engine. Other ranks get none."""

    hooks: Any  # The `GRPOTrainer`. A user's subclass may override its methods.
    config: GRPOConfig
    engine: Engine
    source: RolloutSource
    device_turns: DeviceTurns
    scorer: Scorer
    estimator: AdvantageEstimator
    events: Events

    def __post_init__(self) -> None:
        self.evaluates = False
        self.round = PlainRound(self.events.times)
        self._scales_steps = self.estimator.step_scores is not None
        self._changes = [change for offer in registry.hooks("stages") if (change := offer(self)) is not None]
        if self.engine is not None:
            self.on_leader: Callable[[Callable[[], Any], Any], Any] = self.engine.on_engine_leader

    def collect(self, prompts: Steps) -> SampledRound:
        """Sample and score this rank's prompts of a round. All ranks call this method."""
        self.hooks.begin_records()
        times, began = self.events.times, time.perf_counter()
        waited = times.seconds["wait"]
        draw = self.events.recorder.watching()(lambda: self.round.draw(prompts, self.stages()))
        with on_all_ranks("the rollout"):
            with self.round.around(prompts), self.turn():
                steps = self.on_leader(draw, [SampledStep((), ())] * len(prompts))
            idle_since = time.perf_counter() - (times.seconds["wait"] - waited)
        self.events.recorder.all_sampled()
        ended = time.perf_counter()
        if self.hooks.journal is not None:
            times.move("reward", "journal", self.hooks.journal.take_seconds())
        if self._scales_steps:
            steps = scale_over_steps(steps, self.estimator)
        self.events.sampled([step.sampled for step in steps], self.hooks)
        counts = self.take_counts()
        if world_size() > 1:
            counts |= {"rollout/seconds": ended - began, "rollout/idle_seconds": ended - idle_since}
        for tally in self.round.tallies:
            counts |= tally(steps)
        with on_all_ranks("the statistics"):
            combine, mask_truncated = self.hooks.combine, self.config.mask_truncated_completions
            statistics = [RolloutStatistics.of(step.sampled, combine, mask_truncated) for step in steps]
            for name, number in counts.items():
                among = statistics if name.startswith(DIVIDED) else statistics[:1]
                for part in among:
                    part.counts[name] += number / len(among)  # type: ignore[assignment]
            self.events.recorder.note(steps, statistics, combine)
        if any(math.isnan(total) for part in statistics for total in part.totals):
            self.events.warn_once("unscored", unscored(steps))
        return SampledRound(tuple(steps), tuple(statistics))

    def collect_evaluation(self, prompts: list[Prompt], name: str) -> list[ScoredGroup]:
        """Sample and score this rank's prompts of an evaluation, with all advantages 0. All ranks call this method."""
        self.hooks.begin_records(name)
        round_ = PlainRound(self.events.times, self.config.reward_call == "all")
        self.evaluates = True
        try:
            with self.turn(), on_all_ranks("the evaluation"):
                (step,) = self.on_leader(lambda: round_.draw([prompts], self.stages()), [SampledStep((), ())])
                return [*step.sampled]
        finally:
            self.evaluates = False

    def take_counts(self) -> dict[str, float]:
        parts: Any = self.scorer, self.engine, None if self.source is self.engine else self.source
        return {name: n for part in parts if hasattr(part, "take_counts") for name, n in part.take_counts().items()}

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        return self.device_turns.sampling(self.hooks.optimizer)

    def stages(self) -> Stages:
        """Return the functions that generate and score groups and compute advantages.

        Overridden methods of the trainer replace the functions. Extensions change functions by the hook ``stages``."""
        hooks, replaced = self.hooks, self.hooks.replaced
        compute_advantages = self._checked_advantages if "compute_advantages" in replaced else hooks.compute_advantages
        if self.evaluates:  # `with_advantages` computes an evaluation's advantages later.
            compute_advantages = lambda group, rewards: torch.zeros(len(group.rollouts))  # noqa: E731
        generate = hooks.generate if "generate" in replaced else self.generate
        begin_score = self._begin_replaced if "score" in replaced else self.begin_scoring
        journal, logged = hooks.journal if hooks.is_in_train else None, self.scorer.take_logged
        checks = "generate" in replaced or self.source is not self.engine
        stages = Stages(generate, begin_score, compute_advantages, logged, journal=journal, checks=checks)
        for change in self._changes:
            stages = change(stages)
        return stages

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[Group]:
        """Yield one group per prompt. Training and evaluation have sampling settings of their own."""
        config, step, evaluates = self.config, self.hooks.state.global_step, self.evaluates
        sampling = Sampling.for_evaluation(config) if evaluates else Sampling.for_training(config)
        bar = self.events.console.progress(len(prompts), "evaluate" if evaluates else "generate", "group")
        longest_first = evaluates or self.round.longest_first
        if longest_first and len(prompts) * sampling.n > self.engine.max_sequences:
            prompts = self.hooks.lengths.longest_first(prompts)
        by_position = {prompt.position: prompt for prompt in prompts}
        purpose = "eval" if evaluates else "train"
        with contextlib.closing(bar), stepping(self.engine, bar.sampled):
            for group in self.source.generate(prompts, sampling, version=step, seed=config.seed, purpose=purpose):
                lengths = [int(rollout.sampled.sum()) for rollout in group.rollouts]
                self.hooks.lengths.add(by_position[group.position].input, lengths)
                bar.update(sum(len(rollout.completion_ids) for rollout in group.rollouts))
                yield group

    def begin_scoring(self, groups: Sequence[Group]) -> Scoring:
        """Start one call per reward function for all ``groups`` together. Don't wait for workers or async functions."""
        tokenizer = self.hooks.policy.tokenizer
        read = groups if not has_parser(tokenizer) else [with_messages(group, tokenizer) for group in groups]
        if self.scorer.reads_prompt_texts:
            read = [with_prompt_text(group, tokenizer) for group in read]
        texts = [self.hooks.decode(group) for group in groups]
        self.events.decoded(groups, texts)
        return self.scorer.submit(read, texts, self.hooks.state)

    def _begin_replaced(self, groups: Sequence[Group]) -> PendingRewards:
        score, functions = self.hooks.score, len(self.scorer.rewards)
        return Ready(torch.cat([checked_rewards(score(group), group, functions) for group in groups]))

    def with_advantages(self, groups: Sequence[ScoredGroup]) -> SampledStep:
        """Compute the advantages that `collect_evaluation` has left at 0. All ranks call this method."""
        with on_all_ranks("the advantages"):
            advantages = [self._checked_advantages(one.group, one.rewards.clone()) for one in groups]
        judged = [dataclasses.replace(one, advantages=own) for one, own in zip(groups, advantages, strict=True)]
        (step,) = scale_over_steps([SampledStep(tuple(judged), ())], self.estimator)
        return step

    def _checked_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        return checked_advantages(self.hooks.compute_advantages(group, rewards), group)

"""`Sampler`: prompts in, scored groups out, for training and for evaluation."""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..batch import Group, Prompt, SampledStep, ScoredGroup
from ..config import GRPOConfig
from ..data import PromptDataset, extra_prompts
from ..engine.load import Load, after_each_step, load_after_each_step, stepping
from ..engine.protocol import Engine
from ..engine.sampling import UNKNOWN_TOKENS, LengthHistory, Sampling
from ..extensions.agents.failures import Abstaining, has_failed
from ..extensions.carry_over.rounds import CarriedRounds
from ..extensions.overlap.finished_groups import OwnGroups
from ..extensions.overlap.partition import Partition, recorded_partition
from ..losses.advantages import AdvantageEstimator, scale_over_steps
from ..memory.device_turns import DeviceTurns
from ..parallel.ranks import gather, on_all_ranks, world_size
from ..reporting.completion_log import CompletionLog
from ..reporting.console import Console
from ..reporting.metrics import PhaseTimes
from ..rewards import Ready, Scorer, Scoring
from .rounds import roll_out, sample_steps, unscored
from .stages import PendingRewards, RolloutSource, Stages, checked_advantages, checked_rewards
from .statistics import RolloutStatistics, round_statistics
from .store import RewardedGroup, RolloutStore
from .texts import with_messages, with_prompt_text


class SamplerHooks(Protocol):
    """`GRPOTrainer`'s state and stages. A subclass may replace a stage."""

    state: Any
    is_in_train: bool
    optimizer: Any
    train_prompts: Any

    def begin_records(self, evaluation: str = "") -> None: ...
    def generate(self, prompts: Sequence[Prompt]) -> Iterator[Group]: ...
    def score(self, group: Group) -> torch.Tensor: ...
    def compute_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor: ...
    def combine(self, rewards: torch.Tensor) -> torch.Tensor: ...
    def decode(self, group: Group) -> list[str]: ...
    def replaces(self, stage: str) -> bool: ...


class EarlyTraining(Protocol):
    """Trains finished groups of the next step while ranks sample."""

    @property
    def trains_between_steps(self) -> bool:
        """Whether to train between the steps of this rank's own engine."""

    def begin_sampling(self) -> None:
        """Prepare for a round of sampling."""

    def train_between_steps(self, finished: OwnGroups, load: Load) -> None:
        """Train after a step of this rank's engine."""

    def wait_for_early(self) -> None:
        """Wait for the work queued between steps, as this rank's engine takes no further step."""

    def train_early(self, finished: OwnGroups) -> None:
        """Train after this rank has sampled, until all ranks have sampled and none trains."""


class Purpose(enum.StrEnum):
    """The purpose of sampling. It is part of each request's seed."""

    TRAINING = "train"
    EVALUATION = "eval"


@dataclass(frozen=True, slots=True)
class SampledRound:
    """This rank's scored groups of each optimizer step of a round, with their statistics."""

    steps: tuple[SampledStep, ...]
    statistics: tuple[RolloutStatistics, ...]  # one per step
    partition: Partition | None = None  # recorded partition of the first step, if it was trained while ranks sampled


@dataclass(eq=False)
class Sampler:
    """Samples groups, scores each when its last completion ends, and computes advantages.

    All ranks of an engine call it. The first rank gets the groups.
    """

    hooks: SamplerHooks
    config: GRPOConfig
    tokenizer: Any
    engine: Engine
    source: RolloutSource
    device_turns: DeviceTurns
    scorer: Scorer
    estimator: AdvantageEstimator
    journal: RolloutStore | None
    completion_log: CompletionLog | None
    recorder: Any
    times: PhaseTimes
    console: Console
    lengths: LengthHistory = field(default_factory=LengthHistory)
    carried_rounds: CarriedRounds | None = None  # None: a round ends with its last completion
    finished: OwnGroups | None = None  # None: nothing is trained while a rank samples (`overlap`)

    def __post_init__(self) -> None:
        self.purpose = Purpose.TRAINING
        self._warned_unscored = self._warned_unknown = False
        self._seconds: dict[str, float] = {}  # seconds that sampling took on all ranks, and that this rank was idle
        self._shared: OwnGroups | None = None  # this round's groups that may be trained while ranks sample
        self._meanwhile: EarlyTraining | None = None

    @property
    def submits_later(self) -> bool:
        """Whether more sequences may come when the engine's queue is empty."""
        return bool(getattr(self.source, "submits_later", self.source is not self.engine))

    # -- a round, and an evaluation

    def collect(self, prompts: list[list[Prompt]], meanwhile: EarlyTraining | None = None) -> SampledRound:
        """Sample and score a round.

        Args:
            prompts: this rank's prompts, a list per optimizer step.
            meanwhile: trains finished groups of the first step.
        """
        self.hooks.begin_records()
        partition = self._recorded_partition()
        steps = self._sample(prompts, meanwhile if partition is None else None)
        if self.journal is not None:
            self.times.move("reward", "journal", self.journal.take_seconds())
        steps = scale_over_steps(steps, self.estimator)
        self._log_completions(steps)
        counts, config = self.take_counts() | self._record_passes(steps) | self._seconds, self.config
        self._warn_of_unknown(counts.get(UNKNOWN_TOKENS, 0))
        if self.carried_rounds is not None:
            counts |= self.carried_rounds.counts()
        with on_all_ranks("the statistics"):
            statistics = round_statistics(
                steps, counts, self.hooks.combine, config.mask_truncated_completions, config.dynamic_sampling
            )
            if self.carried_rounds is not None:
                for of_step in statistics:  # so that each step reports its ages, even if all are 0
                    of_step.counts.setdefault("carry_over/ages", 0)
            self.recorder.note(steps, statistics, self.hooks.combine)
        return SampledRound(tuple(steps), tuple(statistics), partition)

    def collect_evaluation(self, prompts: list[Prompt], name: str) -> list[ScoredGroup]:
        """Sample and score the prompts of the evaluation ``name``. Advantages are zero."""
        self.hooks.begin_records(name)
        together = self.config.reward_call == "all"
        self.purpose = Purpose.EVALUATION
        try:
            with self.device_turns.sampling(self.hooks.optimizer), on_all_ranks("the evaluation"):
                return self.engine.on_engine_leader(
                    lambda: roll_out(prompts, self.stages(), self.times, together), others=[]
                )
        finally:
            self.purpose = Purpose.TRAINING

    def _record_passes(self, steps: Sequence[SampledStep]) -> dict[str, float]:
        """Record the pass rates of all ranks in the curriculum. Return its metrics on the first rank. A collective."""
        curriculum = getattr(self.hooks.train_prompts, "curriculum", None)
        if curriculum is None:
            return {}
        threshold, own = curriculum.settings.pass_threshold, []
        with on_all_ranks("the pass rates"):
            for scored in (scored for step in steps for scored in step.sampled):
                totals = self.hooks.combine(scored.rewards.clone())
                judged = totals[~totals.isnan()]
                rate = float((judged >= threshold).float().mean()) if len(judged) else math.nan
                own.append((scored.group.position, rate))
        curriculum.record(passes for of_rank in gather(own) for passes in of_rank)
        return curriculum.counts() if self.config.layout.is_main else {}

    def take_counts(self) -> dict[str, float]:
        """Return the sums that rewards, tools, the engine and the source counted since the last call."""
        source = self.source if self.source is not self.engine and hasattr(self.source, "take_counts") else None
        parts = [part for part in (self.scorer, self.engine, source) if part is not None]
        return {name: number for part in parts for name, number in part.take_counts().items()}

    def _sample(self, prompts: list[list[Prompt]], meanwhile: EarlyTraining | None) -> list[SampledStep]:
        shared = None if meanwhile is None else self.finished
        began, waited = time.perf_counter(), self.times.seconds["wait"]
        with on_all_ranks("the rollout"):
            with self._sharing(shared, prompts[0], meanwhile), self.device_turns.sampling(self.hooks.optimizer):
                steps = self.engine.on_engine_leader(
                    self.recorder.watching(lambda: self._draw(prompts)), others=[SampledStep((), ()) for _ in prompts]
                )
            ready = time.perf_counter()
            if shared is not None and meanwhile is not None:
                for scored in steps[0].kept:
                    shared.add(scored)
                meanwhile.train_early(shared)
                ready = time.perf_counter() - (self.times.seconds["wait"] - waited)
        self.recorder.lanes.all_sampled()
        ended = time.perf_counter()
        if world_size() > 1:
            self._seconds = {"rollout/seconds": ended - began, "rollout/idle_seconds": ended - ready}
        return steps

    @contextlib.contextmanager
    def _sharing(
        self, shared: OwnGroups | None, prompts: Sequence[Prompt], meanwhile: EarlyTraining | None
    ) -> Iterator[None]:
        """Let this rank train its finished groups while it samples, and let ranks that have sampled take them."""
        if shared is None or meanwhile is None:
            yield
            return
        try:
            shared.begin(prompt.position for prompt in prompts)
            self._shared, self._meanwhile = shared, meanwhile
            meanwhile.begin_sampling()
            yield
        finally:
            shared.finish()
            self._shared = self._meanwhile = None

    def _recorded_partition(self) -> Partition | None:
        """Return the recorded partition of the step that is trained next, the same on all ranks. A collective."""
        if not self.config.keeps_journal:
            return None
        step, is_main = self.hooks.state.global_step + 1, self.config.layout.is_main
        return gather(recorded_partition(self.journal, step) if is_main and self.journal is not None else None)[0]

    def _draw(self, prompts: list[list[Prompt]]) -> list[SampledStep]:
        config = self.config

        def more_prompts(drawn: int, count: int) -> list[Prompt]:
            dataset = self.hooks.train_prompts
            assert isinstance(dataset, PromptDataset), "a streamed one was refused"
            return extra_prompts(dataset, config, self.hooks.state.global_step, drawn, count)

        if self.carried_rounds is not None:
            return self.carried_rounds.sample_steps(prompts, self.stages(), self.hooks.state.global_step, more_prompts)
        rounds = config.dynamic_sampling_max_rounds if config.dynamic_sampling else 0
        return sample_steps(prompts, self.stages(), self.times, config.reward_call == "all", rounds, more_prompts)

    # -- the stages

    def stages(self) -> Stages:
        """Return the stages. A subclass of the trainer may have replaced some."""
        journal = self.journal if self.hooks.is_in_train else None
        return Stages(
            self.hooks.generate, self._begin_score, self._advantages_for_purpose, self.scorer.take_logged,
            self.scorer.take_turns, journal, self._finish_group, self._between_steps,
        )  # fmt: skip

    def _finish_group(self, recorded: RewardedGroup) -> None:
        """Share a group that has its rewards: it may be trained from here on."""
        if self._shared is not None and self._shared.wants(recorded.group.position):
            self._shared.add(self.add_advantages(recorded.group, recorded.rewards))

    @contextlib.contextmanager
    def _between_steps(self, work: Callable[[], None]) -> Iterator[None]:
        shared, meanwhile = self._shared, self._meanwhile
        if shared is None or meanwhile is None:
            yield
            return

        def serve() -> None:
            work()
            shared.serve()

        def train(load: Load) -> None:
            with self.times.inside("generate"):
                meanwhile.train_between_steps(shared, load)

        with after_each_step(self.engine, serve):
            if self.submits_later or not meanwhile.trains_between_steps:
                yield
                return
            with load_after_each_step(self.engine, train):
                yield
            started = time.perf_counter()
            meanwhile.wait_for_early()
            self.times.move("generate", "train", time.perf_counter() - started)

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[Group]:
        """Sample each prompt's group for the current purpose. Yield groups as they finish."""
        evaluates = self.purpose is Purpose.EVALUATION
        sampling = Sampling.for_evaluation(self.config) if evaluates else Sampling.for_training(self.config)
        yield from self._write(prompts, self.source, sampling)

    def _write(self, prompts: Sequence[Prompt], source: RolloutSource, sampling: Sampling) -> Iterator[Group]:
        config, step, evaluates = self.config, self.hooks.state.global_step, self.purpose is Purpose.EVALUATION
        bar = self.console.progress(len(prompts), "evaluate" if evaluates else "generate", "group")
        carries = self.carried_rounds is not None and not evaluates  # keep the oldest prompts first
        if len(prompts) * sampling.n > self.engine.max_sequences and not carries:
            prompts = self.lengths.longest_first(prompts)
        by_position = {prompt.position: prompt for prompt in prompts}
        purpose = self.purpose.value
        with contextlib.closing(bar), stepping(self.engine, bar.sampled):
            for group in source.generate(prompts, sampling, version=step, seed=config.seed, purpose=purpose):
                self.lengths.add(by_position[group.position], group)
                bar.update(sum(len(rollout.completion_ids) for rollout in group.rollouts))
                yield group

    def begin_scoring(self, groups: Sequence[Group]) -> Scoring:
        """Start to score groups in one call of the reward functions, while the engine continues to decode."""
        read = [with_messages(group, self.tokenizer) for group in groups]
        if self.scorer.reads_prompt_texts:
            read = [with_prompt_text(group, self.tokenizer) for group in read]
        texts = [self.hooks.decode(group) for group in groups]
        if self.completion_log is not None:
            self.completion_log.keep(groups, texts)
        return self.scorer.submit(read, texts, self.hooks.state)

    def _begin_score(self, groups: Sequence[Group]) -> PendingRewards:
        if any(map(has_failed, groups)):
            return Abstaining(groups, self._begin_score, len(self.scorer.rewards))
        if not self.hooks.replaces("score"):
            return self.begin_scoring(groups)
        functions = len(self.scorer.rewards)
        rewards = torch.cat([checked_rewards(self.hooks.score(group), group, functions) for group in groups])
        if self.scorer.environments is not None:
            self.scorer.environments.end_scoring(groups)
        return Ready(rewards)

    def add_advantages(self, group: Group, rewards: torch.Tensor) -> ScoredGroup:
        """Return the group with its rewards, and with advantages from `GRPOTrainer.compute_advantages`."""
        advantages = self.hooks.compute_advantages(group, rewards.clone())  # a copy, as a subclass may change it
        return ScoredGroup(group, rewards, checked_advantages(advantages, group))

    def _advantages_for_purpose(self, group: Group, rewards: torch.Tensor) -> ScoredGroup:
        if self.purpose is Purpose.EVALUATION:  # an evaluation's loss computes advantages later
            return _without_advantages(group, rewards)
        return self.add_advantages(group, rewards)

    def _warn_of_unknown(self, tokens: float) -> None:
        if tokens and not self._warned_unknown:
            self._warned_unknown = True
            self.console.warn(
                f"rollout: {tokens:.0f} sampled token(s) of this round have no text, since the tokenizer has no token "
                f"for these rows of the model (said once; `{UNKNOWN_TOKENS}` counts on)"
            )

    def _log_completions(self, steps: Sequence[SampledStep]) -> None:
        if not self._warned_unscored and (line := unscored(steps)):
            self._warned_unscored = True  # rank 0 warns of its own completions; the metric counts all ranks'
            self.console.warn(line)
        if self.completion_log is not None:
            with self.times.phase("log"):
                self.completion_log.add([step.sampled for step in steps], self.hooks.decode, self.hooks.state)


def _without_advantages(group: Group, rewards: torch.Tensor) -> ScoredGroup:
    return ScoredGroup(group, rewards, torch.zeros(len(group.rollouts)))

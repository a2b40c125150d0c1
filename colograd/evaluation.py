"""Evaluation: sample and score prompts with settings of their own. No training forward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .batch import Group, Logged, ScoredGroup
from .config import GRPOConfig
from .data import PromptDataset
from .engine import Engine
from .experience import Pending, RolloutStatistics
from .progress import Console
from .ranks import gather, rank, together, world_size
from .rewards import RewardFunction
from .sampling import Sampling


class Evaluated(Protocol):
    """What an evaluation needs of a trainer."""

    args: Any
    engine: Engine
    console: Console
    rewards: list[RewardFunction]
    state: Any

    def publish(self) -> None: ...

    def begin_score(self, groups: Sequence[Group]) -> Pending: ...

    def take_counts(self) -> dict[str, float]: ...

    def take_logged(self, group: Group) -> Logged: ...

    def combine(self, rewards: torch.Tensor) -> torch.Tensor: ...


def evaluate(trainer: Evaluated, prompts: PromptDataset) -> dict[str, float]:
    """TRL's metrics of a batch of completions, over all ranks, for every prompt once; and ``runtime`` in seconds."""
    started = time.perf_counter()
    config: GRPOConfig = trainer.args
    mine = prompts.prompts()[rank() :: world_size()]
    local = RolloutStatistics()
    begun: list[tuple[Group, Pending]] = []
    with together("the evaluation"):
        trainer.publish()
        bar = trainer.console.generation(len(mine), "evaluate")
        sampling, version = Sampling.for_evaluation(config), trainer.state.global_step
        for group in trainer.engine.generate(mine, sampling, version=version, seed=config.seed, purpose="eval"):
            begun.append((group, trainer.begin_score([group])))
            bar.update(sum(len(rollout.completion_ids) for rollout in group.rollouts))
        bar.close()
        for group, pending in begun:
            rewards = pending.result()
            scored = ScoredGroup(group, rewards, torch.zeros(len(group.rollouts)), trainer.take_logged(group))
            local.add(scored, trainer.combine(rewards), mask_truncated=False)
        local.counts.update(trainer.take_counts())
    whole = RolloutStatistics.join(gather(local))
    metrics = whole.metrics([reward.name for reward in trainer.rewards])
    return metrics | {"runtime": time.perf_counter() - started, "completions": float(len(whole.lengths))}

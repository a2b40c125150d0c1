"""Evaluation: sample and score prompts with settings of their own. No training forward, unless it is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch

from ..batch import Group, Logged, LossOutput, MicroBatch, Prompt, ScoredGroup, StepBatch
from ..config import GRPOConfig
from ..data import PromptDataset
from ..losses.advantages import Estimator, divided, step_std
from ..losses.entropy import EntropyController
from ..memory.residency import Residency
from ..parallel.ranks import gather, rank, together, world_size
from ..policy.packing import PackingRules, pack_step
from ..policy.reference import fill
from ..reporting.completion_log import CompletionLog
from ..reporting.metrics import Metrics
from ..rewards import RewardFunction
from ..rollout.rounds import Pending, RolloutStatistics
from ..rollout.stage_checks import checked_advantages, checked_groups, checked_loss

TOKENS = 4096  # of a micro-batch where a GPU's room hasn't been measured yet


class Evaluated(Protocol):
    """What an evaluation needs of a trainer."""

    args: Any
    completion_log: CompletionLog | None
    estimator: Estimator
    entropy: EntropyController
    loss: Any
    model: Any
    optimizer: Any
    reference: Any
    residency: Residency
    rewards: list[RewardFunction]
    rules: PackingRules
    state: Any

    def publish(self) -> None: ...

    def generate(self, prompts: Sequence[Prompt]) -> Generator[Group]: ...

    def begin_score(self, groups: Sequence[Group]) -> Pending: ...

    def decode(self, group: Group) -> list[str]: ...

    def take_counts(self) -> dict[str, float]: ...

    def take_logged(self, group: Group) -> Logged: ...

    def combine(self, rewards: torch.Tensor) -> torch.Tensor: ...

    def compute_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor: ...

    def compute_loss(self, model: torch.nn.Module, micro_batch: MicroBatch) -> LossOutput: ...

    def loss_of(self, step: StepBatch) -> Any: ...

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager: ...


def evaluate(trainer: Evaluated, prompts: PromptDataset, name: str = "eval") -> dict[str, float]:
    """TRL's metrics of a batch of completions, over all ranks, for every prompt once; pass@k, and ``runtime`` in
    seconds.

    Args:
        name: of the evaluation in the completions log.
    """
    started = time.perf_counter()
    config: GRPOConfig = trainer.args
    mine = prompts.prompts()[rank() :: world_size()]
    local = RolloutStatistics()
    scored: list[ScoredGroup] = []
    passes: list[tuple[int, int]] = []
    with trainer.residency.sampling(trainer.optimizer), together("the evaluation"):
        trainer.publish()
        for group, rewards in _scored(trainer, mine, config.reward_call == "all"):
            advantages = torch.zeros(len(group.rollouts))
            if config.loss_eval:
                advantages = checked_advantages(trainer.compute_advantages(group, rewards), group)
            totals = trainer.combine(rewards)
            scored.append(ScoredGroup(group, rewards, advantages, trainer.take_logged(group)))
            local.add(scored[-1], totals, mask_truncated=trainer.rules.mask_truncated)
            passes.append(count_passes(totals, config.pass_threshold_eval))
        local.counts.update(trainer.take_counts())
    if trainer.completion_log is not None:
        trainer.completion_log.add_evaluation(scored, trainer.decode, trainer.state, name)
    parts = gather((local, passes))
    whole = RolloutStatistics.join(part for part, _ in parts)
    metrics = whole.metrics([reward.name for reward in trainer.rewards])
    metrics |= pass_at([entry for _, of_rank in parts for entry in of_rank], config.eval_generations())
    if config.loss_eval:
        metrics |= forward(trainer, scored, whole)
    seconds = time.perf_counter() - started
    metrics |= {"runtime": seconds, "samples_per_second": len(prompts) / seconds}
    return metrics | {
        "completions": float(len(whole.lengths)),
        "num_tokens": float(trainer.state.num_input_tokens_seen),
    }


def _scored(trainer: Evaluated, prompts: Sequence[Prompt], one_call: bool) -> list[tuple[Group, torch.Tensor]]:
    """The prompts' groups with their rewards [G, R]; ``one_call``: scored all together."""
    begun: list[tuple[Group, Pending]] = []
    try:
        with contextlib.closing(checked_groups(trainer.generate(prompts), prompts)) as groups:
            if one_call:
                found = list(groups)
                rewards = trainer.begin_score(found).result() if found else torch.empty(0)
                return list(zip(found, rewards.split([len(group.rollouts) for group in found]), strict=True))
            for group in groups:
                begun.append((group, trainer.begin_score([group])))
        return [(group, pending.result()) for group, pending in begun]
    finally:
        for _, pending in begun:
            pending.cancel()


def count_passes(totals: torch.Tensor, threshold: float) -> tuple[int, int]:
    """Of a prompt's weighted rewards [G]: how many were judged (aren't NaN), and how many of these are passes."""
    return int((~totals.isnan()).sum()), int((totals >= threshold).sum())


def pass_at(passes: Sequence[tuple[int, int]], most: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4 ... ``most``: the chance that at least one of k completions of a prompt is a pass.

    The unbiased estimate from n completions, c of them passes, is 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374, eq. 1). The mean over prompts; one with fewer than k judged completions doesn't count.

    Args:
        passes: (n, c) of each prompt.
    """
    found = {}
    for k in (2**power for power in range(most.bit_length())):
        of_prompts = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in passes if n >= k]
        if of_prompts:
            found[f"pass@{k}"] = sum(of_prompts) / len(of_prompts)
    return found


def forward(trainer: Evaluated, groups: Sequence[ScoredGroup], whole: RolloutStatistics) -> dict[str, float]:
    """The loss of what was sampled, as if it were a step's, and the loss's metrics. A collective; no gradients.

    Args:
        groups: this rank's.
        whole: the statistics of all ranks.
    """
    rules = dataclasses.replace(trainer.rules, max_tokens=trainer.rules.max_tokens or TOKENS)
    if scores := trainer.estimator.step_scores:
        std = step_std([scores(group.rewards) for group in groups])
        groups = [divided(group, std) for group in groups]
    rows = pack_step(sorted(groups, key=lambda group: group.group.position), rules)
    if trainer.reference is not None:
        with together("the reference's log-probabilities"), trainer.compute_loss_context_manager():
            rows = fill(trainer.reference, rows, trainer.args.temperature)
    step = StepBatch(rows, whole.loss_tokens, len(whole.lengths), {}, True, tuple(groups))
    metrics, denominator = Metrics(), trainer.loss.denominator(step)
    metrics.add("loss", 0.0, 1.0 / world_size())
    trained, of_training = trainer.model.training, trainer.loss
    trainer.model.eval()
    try:
        trainer.loss = trainer.loss_of(step)
        with together("the evaluation's forward"), torch.no_grad():
            for row in rows:
                with trainer.compute_loss_context_manager():
                    output = checked_loss(trainer.compute_loss(trainer.model, row), differentiable=False)
                metrics.add("loss", output.loss / denominator, 0.0)
                metrics.update(output.sums, output.minima, output.maxima)
    finally:
        trainer.model.train(trained)
        trainer.loss = of_training
    reduced = metrics.reduce()
    trainer.entropy.show(reduced, reduced["loss"])
    return reduced

"""Evaluate a policy: sample completions of prompts, score them, then compute metrics, pass@k and the loss."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..batch import SampledStep
from ..data import PromptDataset
from ..losses.correction import finish_mismatch
from ..parallel.ranks import gather, on_all_ranks
from ..policy.logprobs import evaluation_mode
from ..rewards.answers import chance_of_pass
from ..rollout.statistics import RolloutStatistics
from .learner import Learner, loss_pass, step_batch

EVALUATION_TOKENS = 4096  # Maximum tokens of a micro-batch in an evaluation before `Learner.measure_budget`.


def evaluate_prompts(trainer: Any, prompts: Any, name: str) -> dict[str, float]:
    config, sampler, started = trainer.args, trainer.sampler, time.perf_counter()
    with on_all_ranks("publishing"):
        trainer.publish()
    if not isinstance(prompts, PromptDataset):  # a benchmark has its own `evaluate`
        of_benchmark: dict[str, float] = prompts.evaluate(trainer, name)
        return of_benchmark
    groups = sampler.collect_evaluation(prompts.prompts(config.layout.data_rank, config.layout.data_size), name)
    own = RolloutStatistics.of(groups, trainer.combine, config.mask_truncated_completions)
    own.counts.update(sampler.take_counts())
    trainer.events.evaluated(groups, name, trainer)
    totals = torch.tensor(own.totals).split([len(scored.group.rollouts) for scored in groups])
    ranks = gather((own, [count_passes(of_group, config.pass_threshold_eval) for of_group in totals]))
    whole = RolloutStatistics.join(statistics for statistics, _ in ranks)
    metrics = whole.metrics(trainer.learner.reward_names)
    metrics |= pass_at([entry for _, of_rank in ranks for entry in of_rank], config.eval_generations())
    metrics["completions"] = float(len(whole.lengths))
    if config.loss_eval:
        metrics |= loss_of(trainer.learner, sampler.with_advantages(groups))
    seconds = time.perf_counter() - started
    metrics |= {"runtime": seconds, "samples_per_second": len(prompts) / seconds}
    return metrics | {"num_tokens": float(trainer.state.num_input_tokens_seen)}


def loss_of(learner: Learner, drawn: SampledStep) -> dict[str, float]:
    tokens = learner.rules.max_tokens or EVALUATION_TOKENS
    rules = dataclasses.replace(learner.rules, max_tokens=tokens, skip_without_signal=False, balance_ranks=False)
    step = step_batch(drawn, RolloutStatistics(), rules, learner.reward_names, learner.events.times)
    step = dataclasses.replace(step, version=learner.hooks.state.global_step)
    (step,) = learner.with_scores([step])
    with evaluation_mode(learner.model):
        step = learner.with_constants(step) if learner.needs_constants else step
        bar = learner.events.console.progress(len(step.rows), "evaluate", "micro-batch")
        with on_all_ranks("the evaluation's forward"), torch.no_grad(), contextlib.closing(bar):
            row_loss, autocast = learner.row_loss(differentiable=False), learner.hooks.compute_loss_context_manager
            metrics = loss_pass(step, row_loss, autocast, None, bar.update)
    reduced = metrics.reduce(step.counted)
    reduced["loss"] /= learner.objective.loss.denominator(step)
    learner.entropy.show(reduced, reduced["loss"] - learner.objective.in_loss(reduced))
    finish_mismatch(reduced)
    return reduced


def count_passes(totals: torch.Tensor, threshold: float) -> tuple[int, int]:
    return int((~totals.isnan()).sum()), int((totals >= threshold).sum())


def pass_at(passes: Sequence[tuple[int, int]], most: int) -> dict[str, float]:
    """Estimate pass@k for k = 1, 2, 4 ... from pairs (scored completions, passes), one per prompt.

    pass@k is the mean of `chance_of_pass` over the prompts with at least k scored completions.
    ``most`` is the number of completions per prompt."""
    sizes = (2**power for power in range(most.bit_length()))
    chances = {k: [chance_of_pass(n, c, k) for n, c in passes if n >= k] for k in sizes}
    return {f"pass@{k}": sum(of_prompts) / len(of_prompts) for k, of_prompts in chances.items() if of_prompts}

"""`Learner`: pack scored groups into micro-batches, and compute the gradient of each optimizer step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..batch import LossOutput, MicroBatch, PackedRow, SampledStep, ScoredGroup, StepBatch, StepConstants
from ..config import GRPOConfig
from ..losses.correction import finish_mismatch
from ..losses.entropy import EntropyController, with_step_entropy
from ..losses.objective import Objective
from ..memory import token_budget
from ..memory.description import optimizer_bytes
from ..memory.shape import left_on_device
from ..parallel import watchdog
from ..parallel.balance import balance, pair_cost
from ..parallel.ranks import gather, on_all_ranks, rank
from ..policy.loading import Policy
from ..policy.logprobs import policy_logprobs, with_old_logprobs
from ..policy.packing import PackingRules, collate, has_signal, loss_tokens, pack_step
from ..policy.second_models import SecondModels, fill, with_second_logprobs
from ..reporting.events import Events
from ..reporting.metrics import Metrics, PhaseTimes, numbers
from ..rollout.checks import shown
from ..rollout.sampler import SampledRound
from ..rollout.statistics import RolloutStatistics
from ..runtime.sizes import active_parameters
from ..sharding import ShardingStrategy


def packing_rules(config: GRPOConfig, policy: Policy, objective: Objective, equal_counts: bool) -> PackingRules:
    return PackingRules(
        max_tokens=config.token_budget,  # 0 means that `Learner.measure_budget` measures the budget later.
        mask_truncated=config.mask_truncated_completions,
        skip_without_signal=not objective.every_group,
        share_prompts=not policy.why_padded,
        balance_ranks=config.balance_ranks and config.layout.data_size > 1,
        equal_counts=equal_counts,
        pair_cost=pair_cost(policy.model.config, active_parameters(policy.model)),
        device=config.device,
        ranks_per_engine=config.layout.ranks_per_engine,
        ranks_per_row=config.layout.ranks_per_row,
    )


def step_batch(
    step: SampledStep,
    statistics: RolloutStatistics,
    rules: PackingRules,
    reward_names: Sequence[str],
    times: PhaseTimes,
    tell: Callable[[RolloutStatistics], None] | None = None,
    groups: Sequence[ScoredGroup] | None = None,
) -> StepBatch:
    """Balance a step's groups over ranks, and pack them into rows. Compute metrics of all ranks. A collective call.

    Args:
        statistics: statistics of this rank's groups.
        tell: function that is called with the joined statistics of all ranks.
        groups: the groups to pack, by default ``step.kept`` without the groups that ``rules`` skip.
    """
    with times.phase("pack"):
        moved = 0
        if groups is None:
            groups = [one for one in step.kept if has_signal(one) or not rules.skip_without_signal]
        if rules.balance_ranks or max(rules.ranks_per_engine, rules.ranks_per_row) > 1:
            sizes = rules.ranks_per_engine, rules.balance_ranks, rules.ranks_per_row
            groups, moved = balance(groups, rules.pair_cost, rules.share_prompts, *sizes)
        rows = pack_step(groups, rules)
    counted = rank() % rules.ranks_per_row == 0
    rollouts = [rollout for scored in step.kept for rollout in scored.group.rollouts]
    in_loss = sum(int(loss_tokens(rollout, rules.mask_truncated).sum()) for rollout in rollouts)
    work = (sum(part.num_tokens for row in rows for part in row.parts), len(rows), moved) if counted else (0, 0, 0)
    ranks = gather(((in_loss, len(rollouts), *work), statistics))
    columns = zip(*(numbers for numbers, _ in ranks), strict=True)
    in_loss, completions, packed_tokens, micro_batches, moved = map(sum, columns)
    sampled = RolloutStatistics.join(statistics for _, statistics in ranks)
    if tell is not None:
        tell(sampled)
    metrics = sampled.metrics(reward_names) | {
        "train/packed_tokens": float(packed_tokens),
        "train/micro_batches": float(micro_batches),
        "train/moved_groups": float(moved),
        "train/sampled_tokens": float(sum(sampled.lengths)),
        # Tokens of prompts and completions. Their sum over steps is TRL's metric `num_tokens`.
        "train/rollout_tokens": float(sampled.prompt_tokens + sum(sampled.lengths)),
    }
    return StepBatch(rows, in_loss, completions, metrics, tuple(groups), counted=counted)


def loss_pass(
    step: StepBatch,
    compute_loss: Callable[[MicroBatch], LossOutput],
    autocast: Callable[[], AbstractContextManager],
    sharding: ShardingStrategy | None,
    passed: Callable[[int], None] = lambda tokens: None,
    metrics: Metrics | None = None,
) -> Metrics:
    """Run forward and backward on this rank for the step's micro-batches that aren't trained yet.

    Args:
        sharding: strategy that runs the backward. None means that only the forward runs.
        passed: function that is called with the number of tokens of each finished micro-batch.
        metrics: metrics of the micro-batches that are trained already.

    Returns:
        ``metrics`` with the metrics of this call added. The metric ``loss`` is the sum over micro-batches.
    """
    metrics = metrics or Metrics()
    metrics.total("loss", 0.0)
    agree = contextlib.nullcontext if sharding is None else sharding.agree
    losses: list[torch.Tensor] = []
    for index, row in enumerate(step.rows[step.trained :], start=step.trained):
        watchdog.progress(f"micro-batch {index + 1} of {len(step.rows)}")
        with agree("training"), autocast():
            output = compute_loss(collate(row))
        loss, output = output.loss.clone(), dataclasses.replace(output, loss=output.loss.detach())
        losses.append(output.loss)
        if sharding is not None:
            with agree("training"):
                sharding.backward(loss)  # only `loss` refers to the autograd graph, so an error frees the graph
        metrics.total("loss", output.loss)
        metrics.update(output.sums, output.minima, output.maxima)
        passed(sum(part.num_tokens for part in row.parts))
    # Losses are read after all backwards, because the host waits for the GPU at each read.
    for index, number in enumerate(numbers(losses) if sharding is not None else (), start=step.trained):
        if not math.isfinite(number):
            raise FloatingPointError(
                f"The loss of step {step.version + 1}, micro-batch {index + 1} is {number}: training stops before the "
                "weights are touched. Lower `learning_rate` or `max_grad_norm`, and look at the step's completions."
            )
    return metrics


def checked_loss(output: Any, differentiable: bool = True) -> LossOutput:
    if not isinstance(output, LossOutput):
        raise ValueError(
            f"`compute_loss` returned {shown(output)}, but must return a colograd.batch.LossOutput (loss, sums, "
            "minima, maxima). To keep the metrics, return `dataclasses.replace(super().compute_loss(...), loss=...)`."
        )
    loss: Any = output.loss
    if not isinstance(loss, torch.Tensor) or loss.shape != () or (differentiable and not loss.requires_grad):
        detached = " without a graph" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
        raise ValueError(
            f"compute_loss returned {shown(loss)}{detached} as the loss. The loss must be a differentiable scalar: the "
            "SUM over the micro-batch's tokens. The trainer divides the gradients by the step's denominator."
        )
    return output


@dataclasses.dataclass(eq=False)
class Learner:
    """Packs scored groups into micro-batches, and computes each optimizer step's gradient over all ranks.

    If a rank runs out of memory in a step, all ranks repeat the step with smaller micro-batches. If every micro-batch
    of the step has a single completion already, the run fails."""

    hooks: Any  # The `GRPOTrainer`. A subclass may override its `compute_loss`.
    config: GRPOConfig
    policy: Policy
    objective: Objective
    rules: PackingRules
    sharding: ShardingStrategy
    second_models: SecondModels
    events: Events

    def __post_init__(self) -> None:
        self.model = self.policy.model
        self.reward_names = [reward.name for reward in self.hooks.rewards]
        self.entropy = EntropyController(self.config)
        self.pending: list[StepBatch] = []  # `pending`: packed optimizer steps that aren't trained yet.
        self.metrics: dict[str, float] = {}  # `metrics`: metrics of the last trained step, over all ranks.
        self.figures: dict[str, float] = {}  # `figures`: loss and gradient norm of the last trained step.
        self.pack: Callable[..., StepBatch] = step_batch
        self.forward_steps = tuple(step for term in self.objective.terms for step in term.steps(self.second_models))

    def schedule(self, sampled: SampledRound) -> Iterator[StepBatch]:
        """Pack a round's groups into optimizer steps. Yield the sequence of steps `num_iterations` times."""
        packing = self.rules, self.reward_names, self.events.times, self.events.recorder.sampled
        steps = [self.pack(*each, *packing) for each in zip(sampled.steps, sampled.statistics, strict=True)]
        self.hooks.state.num_input_tokens_seen += int(sum(step.metrics["train/rollout_tokens"] for step in steps))
        version, autocast = self.hooks.state.global_step, self.hooks.compute_loss_context_manager
        while True:
            try:
                filled = self.with_scores(steps) if self.objective.terms else steps
                scheduled = [
                    dataclasses.replace(step, version=version + index, trained=step.trained * (index < len(steps)))
                    for index, step in enumerate(filled * self.config.num_iterations)
                ]
                # Off-policy steps need the log-probabilities of the weights from before the round's first step.
                rows = dict[int, tuple[PackedRow, ...]]()  # Index in `steps` -> rows with these log-probabilities.
                with on_all_ranks("the old log-probabilities"):
                    for number, step in enumerate(scheduled):
                        rollouts = (rollout for scored in step.groups for rollout in scored.group.rollouts)
                        if all(rollout.policy_version == step.version for rollout in rollouts):
                            continue
                        if (place := number % len(steps)) not in rows:
                            with self.events.times.phase("old_logprobs"), autocast():
                                rows[place] = with_old_logprobs(self.model, filled[place], self.config.temperature).rows
                        scheduled[number] = dataclasses.replace(scheduled[number], rows=rows[place])
                break
            except torch.OutOfMemoryError as error:
                reason = str(error)
            steps = self._back_off(steps, reason, among=len(steps))
        self.pending = scheduled
        while self.pending:
            yield self.pending.pop(0)

    def with_scores(self, steps: list[StepBatch]) -> list[StepBatch]:
        """Add outputs of reference and teacher models to rows, then let loss terms change advantages. A collective."""
        phase, autocast = self.events.times.phase, self.hooks.compute_loss_context_manager
        steps = with_second_logprobs(self.second_models, steps, self.config.temperature, phase, autocast)
        for term in self.objective.terms:
            with on_all_ranks("the advantages"):
                steps = [term.with_scores(step, self.hooks.estimator) for step in steps]
        return steps

    def train(self, step: StepBatch) -> float:
        """Compute one optimizer step's gradient. Return the loss of all ranks' micro-batches."""
        self.model.train()
        while True:
            try:
                step = self.with_constants(step) if self.needs_constants else step
                earlier = step.trained_metrics if step.trained else None
                bar = self.events.console.progress(len(step.rows) - step.trained, "train", "micro-batch")
                recorded, timed = self.events.recorder.trains(step), self.events.times.phase("train")
                with on_all_ranks("training"), recorded, timed, contextlib.closing(bar):
                    autocast = self.hooks.compute_loss_context_manager
                    metrics = loss_pass(step, self.row_loss(), autocast, self.sharding, bar.update, earlier)
                break
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # Outside of the `except` block, where the exception's traceback would keep activations in memory.
            step, *self.pending = self._back_off([step, *self.pending], reason)
        with self.events.times.phase("sync"):
            self.sharding.sum_gradients()
            denominator = self.objective.loss.denominator(step)
            self.sharding.divide_gradients(denominator)
            reduced = metrics.reduce(step.counted)
        loss = self.figures["loss"] = reduced.pop("loss") / denominator
        self.entropy.finish(reduced, loss - self.objective.in_loss(reduced))
        finish_mismatch(reduced)
        self.metrics = {**step.metrics, **reduced}
        return loss

    def clip(self) -> float:
        most = self.config.max_grad_norm or 0.0  # as in transformers, `max_grad_norm: null` turns clipping off
        with self.events.times.phase("optimizer"):
            norm = self.sharding.clip(most if most > 0 else math.inf)
        self.figures["grad_norm"] = norm
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"The gradient of step {self.hooks.state.global_step + 1} has norm {norm}: training stops before the "
                "weights are touched. Lower `learning_rate`, or train with `dtype: float32`."
            )
        return norm

    def finish_step(self) -> dict[str, float]:
        own = self.sharding.traffic.take(), self.events.times.end_step()
        return self.metrics | {name: value for part in own for name, value in part.items()}

    @property
    def needs_constants(self) -> bool:
        return self.objective.needs_constants or "compute_loss" in self.hooks.replaced

    def with_constants(self, step: StepBatch) -> StepBatch:
        """Add values of the whole step (`StepConstants`) to each row, and return the new step. A collective call."""

        def entropies(row: MicroBatch) -> torch.Tensor:
            with self.hooks.compute_loss_context_manager():
                return policy_logprobs(self.model, row, self.config.temperature)[1]

        timed = self.events.times.phase("entropies")
        return with_step_entropy(step, self.objective, self.entropy.applied, entropies, timed)

    def row_loss(self, differentiable: bool = True) -> Callable[[MicroBatch], LossOutput]:
        compute_loss = functools.partial(self.hooks.compute_loss, self.model)
        if "compute_loss" not in self.hooks.replaced:
            return compute_loss
        return lambda row: checked_loss(compute_loss(row), differentiable)

    def measure_budget(self) -> None:
        """Measure how many tokens a micro-batch can have in the memory that vLLM and the optimizer state leave free.

        If the user has set a token budget, measure nothing."""
        if self.rules.max_tokens:
            return
        trainer, config = self.hooks, self.config

        def train(row: PackedRow) -> None:
            with self.sharding.agree("measuring"), self.hooks.compute_loss_context_manager():
                row = dataclasses.replace(row, step_constants=StepConstants(coefficient=config.entropy_coef))
                (row,) = fill(self.second_models, [row], config.temperature)
                loss = self.hooks.compute_loss(self.model, collate(row)).loss
            with self.sharding.agree("measuring"):
                self.sharding.backward(loss)

        with self.events.times.phase("measure"):
            optimizer = trainer.optimizer
            state_is_allocated = optimizer is not None and optimizer.state
            pending = 0 if state_is_allocated else optimizer_bytes(self.model, config.optim) // self.sharding.parts
            pending = left_on_device().state(pending) if config.streams_optimizer else pending
            self.model.train()
            shape = trainer.train_prompts.longest, config.max_completion_length or 1, config.num_generations or 1
            tokens, size = token_budget.measure(
                train, self.free_gradients, shape, self.rules, pending, config.sequence_parallel_size
            )
        self.rules = dataclasses.replace(self.rules, max_tokens=tokens)
        trainer.memory_plan = trainer.memory_plan.with_measured(tokens, size)
        self.events.console.say(
            f"memory: room for micro-batches of {tokens:,} tokens, {size / 2**30:.2f} GiB with their gradients"
        )

    def _back_off(self, steps: list[StepBatch], reason: str, among: int = 1) -> list[StepBatch]:
        self.free_gradients()
        self.rules, steps = token_budget.back_off(self.rules, steps, reason, among)
        self.events.console.warn(
            f"memory: step {self.hooks.state.global_step + 1} ran out of memory and is repeated; micro-batches have at "
            f"most {self.rules.max_tokens:,} tokens from here on"
        )
        return steps

    def free_gradients(self) -> None:
        self.sharding.discard()
        token_budget.free_memory(self.model)

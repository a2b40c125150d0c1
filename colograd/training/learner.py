"""`Learner`: pack scored groups into micro-batches, and compute the gradient of each optimizer step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..batch import LossOutput, MicroBatch, PackedRow, StepBatch, StepConstants
from ..config import GRPOConfig
from ..losses.entropy import EntropyController, with_step_entropy
from ..losses.mismatch import finish_mismatch, mismatch_advice
from ..losses.objective import Objective
from ..memory import token_budget
from ..memory.description import optimizer_bytes
from ..memory.shape import left_on_device
from ..parallel.ranks import on_all_ranks
from ..policy.loading import Policy
from ..policy.logprobs import ForwardStep, policy_logprobs, with_old_logprobs
from ..policy.packing import PackingRules, collate
from ..policy.second_models import OF, SecondModels, fill, with_second_logprobs
from ..reporting.events import Events
from ..rollout.sampler import SampledRound
from ..sharding import ShardingStrategy
from .loss_pass import checked_loss, loss_pass
from .step_batches import step_batch


@dataclasses.dataclass(eq=False)
class Learner:
    """Packs scored groups into micro-batches, runs forward and backward, and sums the gradients over ranks.

    If a step runs out of memory, all ranks pack the step again into smaller micro-batches and repeat the step."""

    hooks: Any  # the `GRPOTrainer`: its state, and its method `compute_loss`, which a subclass may override
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
        self.pending: list[StepBatch] = []  # Packed optimizer steps that aren't trained yet.
        self.metrics: dict[str, float] = {}  # Metrics of the last trained step, over all ranks.
        self.figures: dict[str, float] = {}  # Loss and gradient norm of the present step.
        self.pack: Callable[..., StepBatch] = step_batch  # Function that packs a step's groups into rows.

    def schedule(self, sampled: SampledRound) -> Iterator[StepBatch]:
        """Pack the groups of one sampling phase. Yield optimizer steps in training order, `num_iterations` times."""
        packing = self.rules, self.reward_names, self.events.times, self.events.recorder.sampled
        steps = [self.pack(*each, *packing) for each in zip(sampled.steps, sampled.statistics, strict=True)]
        self.hooks.state.num_input_tokens_seen += int(sum(step.metrics["train/rollout_tokens"] for step in steps))
        version, autocast = self.hooks.state.global_step, self.hooks.compute_loss_context_manager
        while True:
            try:
                filled = self._with_second_models(steps) if self.second_models or self.objective.terms else steps
                scheduled = [
                    dataclasses.replace(step, version=version + index, trained=step.trained * (index < len(steps)))
                    for index, step in enumerate(filled * self.config.num_iterations)
                ]
                off_policy = [
                    number
                    for number, step in enumerate(scheduled)
                    if any(r.policy_version != step.version for scored in step.groups for r in scored.group.rollouts)
                ]
                # Compute the old log-probabilities of all steps now, while the policy has the weights that sampled.
                rows = dict[int, tuple[PackedRow, ...]]()  # Packed rows with old log-probabilities, by step index.
                with on_all_ranks("the old log-probabilities"):
                    for number in off_policy:
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

    def _with_second_models(self, steps: list[StepBatch]) -> list[StepBatch]:
        autocast = self.hooks.compute_loss_context_manager
        for field, second in self.second_models.items():
            phase = self.events.times.phase(field.partition(OF)[0])
            with on_all_ranks("the second models' log-probabilities"), phase, autocast():
                steps = with_second_logprobs({field: second}, steps, self.config.temperature)
        with on_all_ranks("the advantages"):
            for term in self.objective.terms:
                steps = [term.with_scores(step, self.hooks.estimator) for step in steps]
        return steps

    def train(self, step: StepBatch) -> float:
        """Run forward and backward of one optimizer step. The normalised gradient over all ranks stays in ``.grad``.

        Returns:
            The loss of the step over all ranks.
        """
        self.model.train()
        while True:
            try:
                if self.reads_constants:
                    step = self.with_constants(step)
                earlier = step.trained_metrics if step.trained else None
                bar = self.events.console.progress(len(step.rows) - step.trained, "train", "micro-batch")
                recorded, timed = self.events.recorder.trains(step), self.events.times.phase("train")
                with on_all_ranks("training"), recorded, timed, contextlib.closing(bar):
                    given = self.row_loss(), self.hooks.compute_loss_context_manager, self.sharding, bar.update
                    metrics = loss_pass(step, *given, earlier)
                break
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # Back off outside the `except` block: here the exception's traceback no longer holds activations in memory.
            step, *self.pending = self._back_off([step, *self.pending], reason)
        with self.events.times.phase("sync"):
            self.sharding.sum_gradients()
            denominator = self.objective.loss.denominator(step)
            self.sharding.divide_gradients(denominator)
            reduced = metrics.reduce(step.counted)
        loss = self.figures["loss"] = reduced.pop("loss") / denominator
        self.entropy.finish(reduced, loss - self.objective.in_loss(reduced))
        finish_mismatch(reduced)
        self.events.warn_once("mismatch", mismatch_advice(self.config, reduced))
        self.metrics = {**step.metrics, **reduced}
        return loss

    def clip(self) -> float:
        """Clip the gradient to `max_grad_norm`. Return the norm before clipping; raise an error if it isn't finite."""
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
        """Return the metrics of the last optimizer step, including this rank's bytes sent and seconds per phase."""
        own = self.sharding.traffic.take(), self.events.times.end_step()
        return self.metrics | {name: value for part in own for name, value in part.items()}

    @functools.cached_property
    def forward_steps(self) -> tuple[ForwardStep, ...]:
        """Steps that wrap the model's forward because terms of the loss need further outputs."""
        return tuple(step for term in self.objective.terms for step in term.steps(self.second_models))

    @functools.cached_property
    def reads_constants(self) -> bool:
        """Whether the loss may read `StepConstants` (values of the whole step), as a user's `compute_loss` may do."""
        return self.objective.needs_constants or "compute_loss" in self.hooks.replaced

    def with_constants(self, step: StepBatch) -> StepBatch:
        """Return the step with the entropy threshold and coefficient added to every row. A collective call."""

        def entropies(row: MicroBatch) -> torch.Tensor:
            with self.hooks.compute_loss_context_manager():
                return policy_logprobs(self.model, row, self.config.temperature)[1]

        timed = self.events.times.phase("entropies")
        return with_step_entropy(step, self.objective, self.entropy.applied, entropies, timed)

    def row_loss(self, differentiable: bool = True) -> Callable[[MicroBatch], LossOutput]:
        """Return the function that computes a micro-batch's loss. The output of a user's `compute_loss` is checked."""
        compute_loss = functools.partial(self.hooks.compute_loss, self.model)
        if "compute_loss" not in self.hooks.replaced:
            return compute_loss
        return lambda row: checked_loss(compute_loss(row), differentiable)

    def measure_budget(self, shape: tuple[int, int, int]) -> tuple[int, int]:
        """Measure how many tokens a micro-batch may have on this GPU, next to vLLM and the optimizer state.

        Returns:
            The maximum number of tokens, and the bytes that such a micro-batch and the gradients need.
        """
        config = self.config

        def train(row: PackedRow) -> None:
            with self.sharding.agree("measuring"), self.hooks.compute_loss_context_manager():
                row = dataclasses.replace(row, step_constants=StepConstants(coefficient=config.entropy_coef))
                (row,) = fill(self.second_models, [row], config.temperature)
                loss = self.hooks.compute_loss(self.model, collate(row)).loss
            with self.sharding.agree("measuring"):
                self.sharding.backward(loss)

        with self.events.times.phase("measure"):
            optimizer = self.hooks.optimizer  # the optimizer's state may not be allocated yet
            pending = optimizer_bytes(self.model, config.optim) // self.sharding.parts
            pending = 0 if optimizer is not None and optimizer.state else pending
            pending = left_on_device().state(pending) if config.streams_optimizer else pending
            self.model.train()
            given = shape, self.rules, pending, config.sequence_parallel_size
            tokens, size = token_budget.measure(train, self.free_gradients, *given)
        self.rules = dataclasses.replace(self.rules, max_tokens=tokens)
        self.events.console.say(
            f"memory: room for micro-batches of {tokens:,} tokens, {size / 2**30:.2f} GiB with their gradients"
        )
        return tokens, size

    def _back_off(self, steps: list[StepBatch], reason: str, among: int = 1) -> list[StepBatch]:
        """After a rank ran out of memory, pack the untrained optimizer steps again, into smaller micro-batches."""
        self.free_gradients()
        self.rules, steps = token_budget.back_off(self.rules, steps, reason, among)
        self.events.console.warn(
            f"memory: step {self.hooks.state.global_step + 1} ran out of memory and is repeated; micro-batches have at "
            f"most {self.rules.max_tokens:,} tokens from here on"
        )
        return steps

    def free_gradients(self) -> None:
        """Drop the gradients of all micro-batches, and free the memory of these gradients."""
        self.sharding.discard()
        token_budget.free_memory(self.model)

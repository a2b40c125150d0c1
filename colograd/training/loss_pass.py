"""Run a step's micro-batches through forward and loss, and in training (not in an evaluation) through backward."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..batch import LossOutput, MicroBatch, StepBatch
from ..parallel import watchdog
from ..policy.packing import collate
from ..reporting.metrics import Metrics, numbers
from ..rollout.checks import shown
from ..sharding import ShardingStrategy


def loss_pass(
    step: StepBatch,
    compute_loss: Callable[[MicroBatch], LossOutput],
    autocast: Callable[[], AbstractContextManager],
    sharding: ShardingStrategy | None,
    passed: Callable[[int], None] = lambda tokens: None,
    metrics: Metrics | None = None,
) -> Metrics:
    """Run forward and backward of this rank's untrained micro-batches of a step.

    A micro-batch's loss is a sum over tokens. Gradients accumulate in the parameters without normalisation. After the
    last micro-batch, the caller divides the gradients by the step's denominator.

    Args:
        sharding: strategy that runs the backward. None means that only the forward runs.
        passed: function to call after each micro-batch with its number of tokens.
        metrics: metrics of micro-batches that are trained already. The new metrics are added to this object.

    Returns:
        The metrics of the loss, and `loss`, the sum over all micro-batches.
    """
    metrics = metrics or Metrics()
    metrics.total("loss", 0.0)
    agree = contextlib.nullcontext if sharding is None else sharding.agree
    losses: list[torch.Tensor] = []  # losses are read at the end, so that the host waits for the GPU only once
    for index, row in enumerate(step.rows[step.trained :], start=step.trained):
        watchdog.progress(f"micro-batch {index + 1} of {len(step.rows)}")
        with agree("training"), autocast():
            output = compute_loss(collate(row))
        loss, output = output.loss.clone(), dataclasses.replace(output, loss=output.loss.detach())
        losses.append(output.loss)
        if sharding is not None:
            with agree("training"):
                sharding.backward(loss)  # nothing else refers to the autograd graph, so an error frees it
        metrics.total("loss", output.loss)
        metrics.update(output.sums, output.minima, output.maxima)
        passed(sum(part.num_tokens for part in row.parts))
    if sharding is not None:
        check_finite(losses, step.version + 1, step.trained)
    return metrics


def check_finite(losses: Sequence[torch.Tensor], step: int, first: int = 0) -> None:
    """Raise a FloatingPointError if a micro-batch's loss isn't finite. The host waits for the GPU."""
    for index, loss in enumerate(numbers(losses), start=first):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss of step {step}, micro-batch {index} is {loss}: training stops before the "
                "weights are touched. Lower `learning_rate` or `max_grad_norm`, and look at the step's completions."
            )


def checked_loss(output: Any, differentiable: bool = True) -> LossOutput:
    """Return the output of a user's ``compute_loss``, or raise a ValueError if it is no `LossOutput` with a scalar."""
    if not isinstance(output, LossOutput):
        raise ValueError(
            f"compute_loss returned {shown(output)}. `compute_loss` must return a colograd.batch.LossOutput (loss, "
            "sums, minima, maxima). `dataclasses.replace(super().compute_loss(...), loss=...)` keeps the metrics."
        )
    loss: Any = output.loss
    if not isinstance(loss, torch.Tensor) or loss.shape != () or (differentiable and not loss.requires_grad):
        detached = " without a graph" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
        raise ValueError(
            f"compute_loss returned {shown(loss)}{detached} as the loss. The loss must be a differentiable scalar: the "
            "SUM over the micro-batch's tokens. The trainer divides the gradients by the step's denominator."
        )
    return output

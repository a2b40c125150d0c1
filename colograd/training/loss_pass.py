"""The pass of a step's micro-batches through the loss: with a backward in training, without one in an evaluation."""

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
    """Run forward, and backward if there is a ``sharding``, of this rank's untrained micro-batches.

    Gradients of unnormalised sums add up in the parameters. The step's denominator divides them at the end.

    Args:
        sharding: runs the backward; None: no backward.
        passed: function to call after each micro-batch with its number of tokens.
        metrics: metrics of earlier micro-batches, to add to.

    Returns:
        The loss's metrics, and `loss`, the sum over all micro-batches.
    """
    metrics = metrics or Metrics()
    metrics.total("loss", 0.0)
    agree = contextlib.nullcontext if sharding is None else sharding.agree
    losses: list[torch.Tensor] = []  # read once at the end, so the host doesn't wait for each micro-batch
    for index, row in enumerate(step.rows[step.trained :], start=step.trained):
        watchdog.progress(f"micro-batch {index + 1} of {len(step.rows)}")
        with agree("training"), autocast():
            output = compute_loss(collate(row))
        loss, output = output.loss.clone(), dataclasses.replace(output, loss=output.loss.detach())
        losses.append(output.loss)
        if sharding is not None:
            with agree("training"):
                sharding.backward(loss)  # the only reference to the graph, so a failed backward frees it
        metrics.total("loss", output.loss)
        metrics.update(output.sums, output.minima, output.maxima)
        passed(sum(part.num_tokens for part in row.parts))
    if sharding is not None:
        check_finite(losses, step.version + 1, step.trained)
    return metrics


def check_finite(losses: Sequence[torch.Tensor], step: int, first: int = 0) -> None:
    """Raise a FloatingPointError if a loss isn't finite. The host waits for the device."""
    for index, loss in enumerate(numbers(losses), start=first):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss of step {step}, micro-batch {index} is {loss}: training stops before the "
                "weights are touched. Lower learning_rate or max_grad_norm, and look at the step's completions."
            )


def checked_loss(output: Any, differentiable: bool = True) -> LossOutput:
    """Check and return the output of ``compute_loss``."""
    if not isinstance(output, LossOutput):
        raise ValueError(
            f"compute_loss returned {shown(output)}, but must return a colograd.batch.LossOutput(loss, sums, "
            "minima, maxima): dataclasses.replace(super().compute_loss(...), loss=...) keeps the metrics."
        )
    loss: Any = output.loss
    if not isinstance(loss, torch.Tensor) or loss.shape != () or (differentiable and not loss.requires_grad):
        detached = " without a graph" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
        raise ValueError(
            f"compute_loss returned a loss that is {shown(loss)}{detached}, but must return a differentiable "
            "scalar: the SUM over the micro-batch's tokens, which the trainer divides by the step's denominator."
        )
    return output

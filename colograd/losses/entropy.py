"""Entropy values of a whole step: the threshold of `top_entropy_quantile`, and the entropy bonus's coefficient.

TRL computes threshold and mean entropy per micro-batch, so its update depends on the division into micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from ..batch import MicroBatch, StepBatch, StepConstants
from ..config import GRPOConfig
from ..parallel.ranks import gather, on_all_ranks
from ..policy.packing import collate
from .objective import BONUS_ENTROPY, Objective, top_threshold


def with_step_entropy(
    step: StepBatch, objective: Objective, coefficient: float, entropies: Callable[[MicroBatch], torch.Tensor],
    timed: AbstractContextManager[None] | None = None,
) -> StepBatch:  # fmt: skip
    """Return the step with `StepConstants` on its rows. A collective.

    Args:
        entropies: function that computes a micro-batch's entropies by an additional forward. It is called only if
            `top_entropy_quantile` < 1 and all ranks together have more than one micro-batch, because the threshold
            needs the entropies of all tokens.
    """
    threshold, tokens = None, float(max(step.num_loss_tokens, 1)) if objective.top_entropy_quantile == 1 else None
    if objective.top_entropy_quantile < 1 and sum(gather(len(step.rows) * step.counted)) > 1:
        with on_all_ranks("the entropies"), torch.no_grad(), timed or nullcontext():
            micro_batches = map(collate, step.rows)
            values = [torch.stack([entropies(one), one.loss_mask]) for one in micro_batches]
            of_all, mask = torch.cat(values, dim=1).cpu() if values else torch.zeros(2, 0)
            own = of_all[mask > 0]
        everywhere = torch.cat(gather(own if step.counted else own[:0]))
        threshold = top_threshold(everywhere, objective.top_entropy_quantile)
        tokens = float(max((everywhere >= threshold).sum(), 1))
    constants = StepConstants(coefficient, objective.loss.denominator(step), threshold, tokens)
    step = dataclasses.replace(step, rows=tuple(dataclasses.replace(r, step_constants=constants) for r in step.rows))
    for term in objective.terms:
        step = term.with_constants(step)
    return step


class EntropyController(TrainerCallback):
    """Callback with the entropy bonus's coefficient: constant, or adapted (Skywork-OR1, arXiv 2505.22312).

    With `use_adaptive_entropy` a mean entropy above ``entropy_target`` lowers the coefficient, and the next step has no
    bonus. Any other mean entropy raises the coefficient. Changes stop at `entropy_coef_min` and `entropy_coef_max`.
    Checkpoints store an adapted coefficient."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.coefficient, self.last_entropy = float(config.entropy_coef), math.inf

    @property
    def applied(self) -> float:
        if self.config.use_adaptive_entropy and self.last_entropy > self.config.entropy_target:
            return 0.0
        return self.coefficient

    def show(self, metrics: dict[str, float], loss: float) -> float | None:
        """Add `policy_loss`, which is ``loss`` without the bonus, to the metrics of a run with a bonus.

        Returns:
            Mean entropy in nats of the tokens that the bonus counts. None without a bonus, or if it counts no token.
        """
        entropy = metrics.pop(BONUS_ENTROPY, None)
        if self.config.entropy_coef != 0 or self.config.use_adaptive_entropy:
            metrics["policy_loss"] = loss + self.applied * (entropy or 0.0)
        return entropy

    def finish(self, metrics: dict[str, float], loss: float) -> None:
        """Adapt the coefficient after a training step, and add the metrics of the bonus."""
        config, entropy = self.config, self.show(metrics, loss)
        if config.use_adaptive_entropy and entropy is not None:
            if entropy <= config.entropy_target:
                self.coefficient = min(self.coefficient + config.entropy_coef_delta, config.entropy_coef_max)
            else:
                self.coefficient = max(self.coefficient - config.entropy_coef_delta, config.entropy_coef_min)
            self.last_entropy = entropy
        if config.entropy_coef != 0 or config.use_adaptive_entropy:
            metrics["entropy_coef"] = self.coefficient

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.coefficient, self.last_entropy = float(self.config.entropy_coef), math.inf
        stored = state.stateful_callbacks.get(type(self).__name__)
        if stored is not None and self.config.use_adaptive_entropy:
            self.coefficient, self.last_entropy = stored["coefficient"], stored["last_entropy"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.config.use_adaptive_entropy and math.isfinite(self.last_entropy):
            stored = {"coefficient": self.coefficient, "last_entropy": self.last_entropy}
            state.stateful_callbacks[type(self).__name__] = stored

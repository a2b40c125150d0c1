"""`LossTerm`: a term that an extension adds to the objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..batch import MicroBatch, StepBatch
from ..policy.logprobs import ForwardStep
from .advantages import AdvantageEstimator
from .tokens import Means


class LossTerm:
    """A term that an extension adds to the objective. A subclass overrides some of these methods.

    The extension offers a function (configuration, policy) -> `LossTerm` or None at the seam "loss_term".
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of the rows that second models (reference, teacher) fill."""
        return ()

    @property
    def every_group(self) -> bool:
        """Whether there is a gradient in groups without a reward difference."""
        return False

    @property
    def waits(self) -> str:
        """The reason to train no group before its whole step is sampled; empty if there is none."""
        return ""

    def steps(self, second_models: Mapping[str, Any]) -> tuple[ForwardStep, ...]:
        """Return the forward's steps that compute the term's values."""
        return ()

    def with_scores(self, step: StepBatch, estimator: AdvantageEstimator) -> StepBatch:
        """Change a step's advantages, once its rows have the second models' values."""
        return step

    def with_constants(self, step: StepBatch) -> StepBatch:
        """Add the values that the term needs of the whole step to its rows' constants. A collective."""
        return step

    def before(self, old: torch.Tensor, batch: MicroBatch) -> MicroBatch:
        """Change a micro-batch before its loss; ``old`` are the old log-probabilities (N,)."""
        return batch

    def of_tokens(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Compute a summand (N,) of the tokens' losses from the forward's values, before the loss averages them."""
        return None

    def of_row(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Compute a summand () of the micro-batch's loss."""
        return None

    def observe(self, old: torch.Tensor, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> Means:
        """Compute metrics."""
        return {}

    def in_loss(self, metrics: Mapping[str, float]) -> float:
        """Return the term's part of a step's loss that isn't the policy's, from the step's metrics."""
        return 0.0

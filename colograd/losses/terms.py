"""`LossTerm`: the base class of terms that extensions add to the loss, for example a distillation term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..batch import MicroBatch, StepBatch
from ..policy.logprobs import ForwardStep
from .advantages import AdvantageEstimator
from .tokens import Means


class LossTerm:
    """A term that an extension adds to the loss. A subclass overrides the methods that its term needs. The extension
    lists a function (configuration, policy) -> `LossTerm` or None under "loss_term" in its `HOOKS`."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the row's values that a reference or teacher model must compute for this term."""
        return ()

    @property
    def every_group(self) -> bool:
        """Whether the term has a gradient in a group with equal rewards, so that such groups must be trained."""
        return False

    @property
    def waits(self) -> str:
        """The reason why no group may be trained before its whole step is sampled. Empty means no reason."""
        return ""

    def steps(self, second_models: Mapping[str, Any]) -> tuple[ForwardStep, ...]:
        """Return the `ForwardStep`s, wrappers of the policy's forward, that compute values for this term."""
        return ()

    def with_scores(self, step: StepBatch, estimator: AdvantageEstimator) -> StepBatch:
        """Return the step with changed advantages. Called when reference and teacher models have filled the rows."""
        return step

    def with_constants(self, step: StepBatch) -> StepBatch:
        """Return the step with values of the whole step, which this term needs, on all its rows. A collective."""
        return step

    def before(self, old: torch.Tensor, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with changes for its loss. ``old`` are the old policy's log-probabilities (N,)."""
        return batch

    def of_tokens(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return values (N,) to add to the tokens' losses before they are averaged. ``values`` come from `steps`."""
        return None

    def of_row(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return a () tensor to add to the micro-batch's loss, after the sum over tokens."""
        return None

    def observe(self, old: torch.Tensor, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> Means:
        """Return the term's metrics of a micro-batch as name -> (sum, count)."""
        return {}

    def in_loss(self, metrics: Mapping[str, float]) -> float:
        """Return this term's share of a step's loss, computed from the metrics. `policy_loss` leaves that share out."""
        return 0.0

"""Second models, whose log-probabilities of the policy's rows the objective needs: the reference of the KL term.

They are computed once, when a round has been sampled, and go with the rows. Another kind (a teacher, say) is a line in
KINDS, a field of `PackedRow` and `MicroBatch`, and a term of the objective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save_file

from ..batch import MicroBatch, PackedRow, StepBatch
from ..config import GRPOConfig
from .head import TeacherHead
from .loading import Policy
from .logprobs import PolicyForward, policy_logprobs
from .reference import reference_bytes, reference_of
from .teacher import teacher_bytes, teacher_of


class SecondModel(Protocol):
    """A model, or the policy's with other weights, that runs on the policy's rows."""

    model: Any
    of_policy: bool  # it has the policy's architecture, and runs rows as the policy does

    @property
    def head(self) -> TeacherHead | None:
        """With which the loss computes logits of its own."""

    def present(self) -> AbstractContextManager[Any]:
        """A context with the model, in evaluation mode, with its weights, on the policy's device."""

    def describe(self) -> str: ...

    def save(self, checkpoint: str | Path, write: Callable[..., Any] = save_file) -> None: ...

    def load(self, checkpoint: str | Path) -> None: ...


def _logprobs(model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    return policy_logprobs(model, batch, temperature)[0]


def _states(model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Beside a GPU they wait on the host: a row's are larger than all else of it."""
    return PolicyForward(model, temperature).states(batch).cpu()


class Kind(NamedTuple):
    name: str  # in the memory plan
    make: Callable[[GRPOConfig, Policy], SecondModel]  # once the policy is in its place
    nbytes: Callable[[GRPOConfig, Policy], int]  # on the policy's device
    read: Callable[[Any, MicroBatch, float], torch.Tensor] = _logprobs  # of a micro-batch, at the temperature


KINDS = {  # by the rows' field that it fills
    "ref_logprobs": Kind("reference", reference_of, reference_bytes),
    "teacher_logprobs": Kind("teacher", teacher_of, teacher_bytes),
    "teacher_states": Kind("teacher", teacher_of, teacher_bytes, _states),
}

SecondModels = dict[str, SecondModel]


def second_models(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> SecondModels:
    """The second models that an objective `needs`, by the rows' field that each fills."""
    return {field: KINDS[field].make(config, policy) for field in needs}


def second_model_bytes(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> dict[str, int]:
    """Bytes that the second models will hold on the policy's device before they are cut, by the names of a plan."""
    return {KINDS[field].name: KINDS[field].nbytes(config, policy) for field in needs}


@torch.no_grad()
def fill(models: SecondModels, rows: Sequence[PackedRow], temperature: float) -> tuple[PackedRow, ...]:
    """The rows with what each second model says of them; its own routers choose its experts."""
    for field, second in models.items() if rows else ():
        with second.present() as model:
            batches = (dataclasses.replace(PolicyForward.prepare(row), experts=None) for row in rows)
            found = [KINDS[field].read(model, batch, temperature) for batch in batches]
        rows = [dataclasses.replace(row, **{field: values}) for row, values in zip(rows, found, strict=True)]
    return tuple(rows)


def with_second_logprobs(models: SecondModels, steps: Sequence[StepBatch], temperature: float) -> list[StepBatch]:
    """The steps of a round with the second models' log-probabilities, from one visit to each. Rows that are trained
    already have them."""
    rows = iter(fill(models, [row for step in steps for row in step.rows[step.trained :]], temperature))
    filled = [step.rows[: step.trained] + tuple(next(rows) for _ in step.rows[step.trained :]) for step in steps]
    return [dataclasses.replace(step, rows=rows_of_step) for step, rows_of_step in zip(steps, filled, strict=True)]

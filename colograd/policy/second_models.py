"""Second models: the reference of the KL term and teachers. The objective needs their log-probabilities of the rows.

They are computed once, after a round has been sampled, and travel with the rows. A further kind needs a line in KINDS,
and a term of the objective.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save_file

from ..batch import UNTAUGHT, MicroBatch, PackedRow, StepBatch
from ..config import GRPOConfig
from ..extensions.distillation.head import TeacherHead
from ..extensions.distillation.teacher import OtherAdapter, Teacher, config_of, teacher_bytes, teacher_of
from .loading import Policy
from .logprobs import PolicyForward, policy_logprobs
from .reference import reference_bytes, reference_of


class SecondModel(Protocol):
    """Model that runs on the policy's rows: a separate one, or the policy's with other weights."""

    model: Any
    of_policy: bool  # whether it has the policy's architecture, and runs rows as the policy does

    @property
    def head(self) -> TeacherHead | None:
        """Head for computing the second model's logits in the loss; None: the loss needs no logits."""

    def present(self) -> AbstractContextManager[Any]:
        """Return a context with the model in evaluation mode, with its weights, on the policy's device."""

    def describe(self) -> str: ...

    def save(self, checkpoint: str | Path, write: Callable[..., Any] = save_file) -> None: ...

    def load(self, checkpoint: str | Path) -> None: ...


def _logprobs(second: SecondModel, model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    return policy_logprobs(model, batch, temperature)[0]


def _states(second: SecondModel, model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Compute a batch's hidden states, and keep them on the host: they are larger than the rest of the row."""
    return PolicyForward(model, temperature).states(batch).cpu()


def _top(second: SecondModel, model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    assert isinstance(second, Teacher | OtherAdapter)
    return PolicyForward(model, temperature).top(batch, second.top).cpu()


class Kind(NamedTuple):
    name: str  # name in the memory plan
    make: Callable[[GRPOConfig, Policy], SecondModel]  # constructor, called when the policy is on its device
    nbytes: Callable[[GRPOConfig, Policy], int]  # bytes on the policy's device
    # Function from the second model, the model in its `present()`, a micro-batch and the temperature to the values.
    read: Callable[[SecondModel, Any, MicroBatch, float], torch.Tensor] = _logprobs


KINDS = {  # kinds by the field of the rows that they fill
    "ref_logprobs": Kind("reference", reference_of, reference_bytes),
    "teacher_logprobs": Kind("teacher", teacher_of, teacher_bytes),
    "teacher_states": Kind("teacher", teacher_of, teacher_bytes, _states),
    "teacher_top": Kind("teacher", teacher_of, teacher_bytes, _top),
}

OF = " of "  # separator of a field and a teacher's name, if there are several teachers
SecondModels = dict[str, SecondModel]  # by the field of the rows, plus the name if several models fill the field


def second_models(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> SecondModels:
    """Make the second models that an objective `needs`, by the field of the rows that each fills."""
    return {key: kind.make(each, policy) for key, kind, each in _asked(needs, config)}


def _asked(needs: Sequence[str], config: GRPOConfig) -> Iterator[tuple[str, Kind, GRPOConfig]]:
    """Yield each second model's key, its kind, and the configuration as if it were the only one of its kind."""
    for field in needs:
        several = config.teachers if KINDS[field].name == "teacher" else {"": ""}
        for name in several:
            yield f"{field}{OF}{name}" if name else field, KINDS[field], config_of(config, name)


def second_model_bytes(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> dict[str, int]:
    """Return the second models' bytes on the policy's device before they are cut, by their names in the memory plan."""
    found: dict[str, int] = {}
    for _, kind, each in _asked(needs, config):
        found[kind.name] = found.get(kind.name, 0) + kind.nbytes(each, policy)
    return found


@torch.no_grad()
def fill(models: SecondModels, rows: Sequence[PackedRow], temperature: float) -> tuple[PackedRow, ...]:
    """Return the rows with each second model's values added. The model's own routers choose its experts.

    If there are several teachers, each one reads the groups that name it.
    """
    for key, second in models.items() if rows else ():
        field, _, name = key.partition(OF)
        with second.present() as model:
            read = functools.partial(_read, KINDS[field], second, model, temperature)
            found = [_of_one(row, field, name, read) if name else read(row) for row in rows]
        rows = [row.with_values(field, values) for row, values in zip(rows, found, strict=True)]
    return tuple(rows)


def _read(kind: Kind, second: SecondModel, model: Any, temperature: float, row: PackedRow) -> torch.Tensor:
    return kind.read(second, model, PolicyForward.prepare(row).for_other_models(), temperature)


def _of_one(row: PackedRow, field: str, name: str, read: Callable[[PackedRow], torch.Tensor]) -> torch.Tensor:
    """Compute (N,) values of the groups that name this teacher; other places keep their value, or are UNTAUGHT."""
    lengths = [sum(len(rollout.completion_ids) for rollout in part.rollouts) for part in row.parts]
    values = row.values(field)
    values = torch.full((sum(lengths),), UNTAUGHT, device=row.device) if values is None else values.clone()
    own = [part.teacher == name for part in row.parts]
    if any(own):
        parts = tuple(part for part, mine in zip(row.parts, own, strict=True) if mine)
        places = values.split(lengths)  # views
        said = read(PackedRow(parts, row.mask_truncated, row.device))
        for place, of_part in zip(
            (place for place, mine in zip(places, own, strict=True) if mine),
            said.split([n for n, mine in zip(lengths, own, strict=True) if mine]),
            strict=True,
        ):
            place.copy_(of_part)
    return values


def with_second_logprobs(models: SecondModels, steps: Sequence[StepBatch], temperature: float) -> list[StepBatch]:
    """Return a round's steps with the second models' values added. Each model is brought to the device once.

    Rows that are already trained have their values.
    """
    rows = iter(fill(models, [row for step in steps for row in step.rows[step.trained :]], temperature))
    filled = [step.rows[: step.trained] + tuple(next(rows) for _ in step.rows[step.trained :]) for step in steps]
    return [dataclasses.replace(step, rows=rows_of_step) for step, rows_of_step in zip(steps, filled, strict=True)]

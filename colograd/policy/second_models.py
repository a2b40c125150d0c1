"""Second models, whose log-probabilities of the policy's rows the objective needs: the reference of the KL term.

They are computed once, when a round has been sampled, and go with the rows. Another kind (a teacher, say) is a line in
KINDS, a field of `PackedRow` and `MicroBatch`, and a term of the objective.
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
from .loading import Policy
from .logprobs import PolicyForward, policy_logprobs
from .reference import reference_bytes, reference_of
from .teacher import OtherAdapter, Teacher, config_of, teacher_bytes, teacher_of
from .teacher_head import TeacherHead


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


def _logprobs(second: SecondModel, model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    return policy_logprobs(model, batch, temperature)[0]


def _states(second: SecondModel, model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Beside a GPU they wait on the host: a row's are larger than all else of it."""
    return PolicyForward(model, temperature).states(batch).cpu()


def _top(second: SecondModel, model: Any, batch: MicroBatch, temperature: float) -> torch.Tensor:
    assert isinstance(second, Teacher | OtherAdapter)
    return PolicyForward(model, temperature).top(batch, second.top).cpu()


class Kind(NamedTuple):
    name: str  # in the memory plan
    make: Callable[[GRPOConfig, Policy], SecondModel]  # once the policy is in its place
    nbytes: Callable[[GRPOConfig, Policy], int]  # on the policy's device
    # Of a micro-batch, at the temperature; given the second model, and what it presents.
    read: Callable[[SecondModel, Any, MicroBatch, float], torch.Tensor] = _logprobs


KINDS = {  # by the rows' field that it fills
    "ref_logprobs": Kind("reference", reference_of, reference_bytes),
    "teacher_logprobs": Kind("teacher", teacher_of, teacher_bytes),
    "teacher_states": Kind("teacher", teacher_of, teacher_bytes, _states),
    "teacher_top": Kind("teacher", teacher_of, teacher_bytes, _top),
}

OF = " of "  # between a field and the name of a teacher, where there are several
SecondModels = dict[str, SecondModel]  # by the rows' field that each fills, with its name where several fill one


def second_models(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> SecondModels:
    """The second models that an objective `needs`, by the rows' field that each fills."""
    return {key: kind.make(each, policy) for key, kind, each in _asked(needs, config)}


def _asked(needs: Sequence[str], config: GRPOConfig) -> Iterator[tuple[str, Kind, GRPOConfig]]:
    """Each second model's key, its kind, and the configuration as if it were the only one of its kind."""
    for field in needs:
        several = config.teachers if KINDS[field].name == "teacher" else {"": ""}
        for name in several:
            yield f"{field}{OF}{name}" if name else field, KINDS[field], config_of(config, name)


def second_model_bytes(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> dict[str, int]:
    """Bytes that the second models will hold on the policy's device before they are cut, by the names of a plan."""
    found: dict[str, int] = {}
    for _, kind, each in _asked(needs, config):
        found[kind.name] = found.get(kind.name, 0) + kind.nbytes(each, policy)
    return found


@torch.no_grad()
def fill(models: SecondModels, rows: Sequence[PackedRow], temperature: float) -> tuple[PackedRow, ...]:
    """The rows with what each second model says of them; its own routers choose its experts. Of several teachers each
    reads the groups that name it."""
    for key, second in models.items() if rows else ():
        field, _, name = key.partition(OF)
        with second.present() as model:
            read = functools.partial(_read, KINDS[field], second, model, temperature)
            found = [_of_one(row, field, name, read) if name else read(row) for row in rows]
        rows = [dataclasses.replace(row, **{field: values}) for row, values in zip(rows, found, strict=True)]
    return tuple(rows)


def _read(kind: Kind, second: SecondModel, model: Any, temperature: float, row: PackedRow) -> torch.Tensor:
    return kind.read(second, model, dataclasses.replace(PolicyForward.prepare(row), experts=None), temperature)


def _of_one(row: PackedRow, field: str, name: str, read: Callable[[PackedRow], torch.Tensor]) -> torch.Tensor:
    """(N,) what the row has of others, else UNTAUGHT, and of the groups that name this one what it says."""
    lengths = [sum(len(rollout.completion_ids) for rollout in part.rollouts) for part in row.parts]
    values = getattr(row, field)
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
    """The steps of a round with the second models' log-probabilities, from one visit to each. Rows that are trained
    already have them."""
    rows = iter(fill(models, [row for step in steps for row in step.rows[step.trained :]], temperature))
    filled = [step.rows[: step.trained] + tuple(next(rows) for _ in step.rows[step.trained :]) for step in steps]
    return [dataclasses.replace(step, rows=rows_of_step) for step, rows_of_step in zip(steps, filled, strict=True)]

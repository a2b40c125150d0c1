"""Second models, such as the reference of the KL term. The objective needs their values of the rows.

They are computed once, after a round has been sampled, and travel with the rows. A further kind is a `Kind` at the seam
"second_model", a field of `PackedRow` and `MicroBatch`, and a term of the objective.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save_file

from ..batch import MicroBatch, PackedRow, StepBatch
from ..config import GRPOConfig
from ..runtime import registry
from .loading import Policy
from .logprobs import install, policy_logprobs, steps_of
from .lora import unwrap
from .packing import collate


class SecondModel(Protocol):
    """Model that runs on the policy's rows: a separate one, or the policy's with other weights."""

    model: Any
    of_policy: bool  # whether it has the policy's architecture, and runs rows as the policy does

    def present(self) -> AbstractContextManager[Any]:
        """Return a context with the model in evaluation mode, with its weights, on the policy's device."""

    def describe(self) -> str: ...

    def save(self, checkpoint: str | Path, write: Callable[..., Any] = save_file) -> None: ...

    def load(self, checkpoint: str | Path) -> None: ...


def prepared(row: PackedRow) -> MicroBatch:
    """Return a row's tensors for a second model. Its own routers choose its experts."""
    return collate(row).for_other_models()


def own_logprobs(second: SecondModel, model: Any, row: PackedRow, temperature: float, name: str = "") -> torch.Tensor:
    return policy_logprobs(model, prepared(row), temperature)[0]


class Kind(NamedTuple):
    """A kind of second models."""

    field: str  # field of the rows that it fills
    name: str  # name in the memory plan
    make: Callable[[GRPOConfig, Policy], SecondModel]  # constructor, called when the policy is on its device
    nbytes: Callable[[GRPOConfig, Policy], int]  # bytes on the policy's device
    # Function from the second model, the model in its `present()`, a row, the temperature, and its name among several.
    read: Callable[[SecondModel, Any, PackedRow, float, str], torch.Tensor] = own_logprobs
    # Configuration of each model of this kind, as if it were the only one; by name if there are several.
    configs: Callable[[GRPOConfig], Mapping[str, GRPOConfig]] = lambda config: {"": config}


OF = " of "  # separator of a field and a model's name, if several models fill the field
SecondModels = dict[str, SecondModel]  # by the field of the rows, plus the name if several models fill the field


def kinds() -> dict[str, Kind]:
    """Return the kinds by the field of the rows that they fill."""
    return {kind.field: kind for kind in registry.hooks("second_model")}


def second_models(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> SecondModels:
    """Make the second models that an objective `needs`, by the field of the rows that each fills."""
    found = {key: kind.make(each, policy) for key, kind, each in _of_run(needs, config)}
    for second in found.values():
        present = {type(step) for step in steps_of(unwrap(second.model))}
        for step in steps_of(unwrap(policy.model)):
            if step.of_rows and type(step) not in present:
                install(second.model, step)
    return found


def _of_run(needs: Sequence[str], config: GRPOConfig) -> Iterator[tuple[str, Kind, GRPOConfig]]:
    """Yield each second model's key, its kind, and the configuration as if it were the only one of its kind."""
    if "ref_logprobs" in needs:
        registry.require("reference", f"beta: {config.beta:g}")
    for field in needs:
        kind = kinds()[field]
        for name, own in kind.configs(config).items():
            yield f"{field}{OF}{name}" if name else field, kind, own


def second_model_bytes(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> dict[str, int]:
    """Return the second models' bytes on the policy's device before they are cut, by their names in the memory plan."""
    nbytes = Counter[str]()
    for _, kind, each in _of_run(needs, config):
        nbytes[kind.name] += kind.nbytes(each, policy)
    return nbytes


@torch.no_grad()
def fill(models: SecondModels, rows: Sequence[PackedRow], temperature: float) -> tuple[PackedRow, ...]:
    """Return the rows with each second model's values added."""
    for key, second in models.items() if rows else ():
        field, _, name = key.partition(OF)
        with second.present() as model:
            read = kinds()[field].read
            values = [read(second, model, row, temperature, name) for row in rows]
        rows = [row.with_values(field, own) for row, own in zip(rows, values, strict=True)]
    return tuple(rows)


def with_second_logprobs(models: SecondModels, steps: Sequence[StepBatch], temperature: float) -> list[StepBatch]:
    """Return a round's steps with the second models' values added. Each model is brought to the device once.

    Rows that are already trained have their values.
    """
    rows = iter(fill(models, [row for step in steps for row in step.rows[step.trained :]], temperature))
    filled = [step.rows[: step.trained] + tuple(next(rows) for _ in step.rows[step.trained :]) for step in steps]
    return [dataclasses.replace(step, rows=rows_of_step) for step, rows_of_step in zip(steps, filled, strict=True)]

"""Second models: reference and teacher models, which compute values for a row before the row is trained."""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from ..batch import MicroBatch, PackedRow, StepBatch
from ..config import GRPOConfig
from ..parallel.ranks import on_all_ranks
from ..runtime import registry
from .loading import Policy
from .logprobs import install, policy_logprobs, steps_of
from .lora import unwrap
from .packing import collate


class SecondModel(ABC):
    """A reference or teacher model. `model` may be the policy's module, with other weights inside `present()`."""

    model: Any
    of_policy = True  # Whether the policy's kernels and its choice of packed or padded rows also hold for this model.

    @abstractmethod
    def present(self) -> AbstractContextManager[Any]:
        """Return a context that yields the model in evaluation mode, ready for forwards on the policy's device."""

    @abstractmethod
    def describe(self) -> str: ...

    def callback(self, policy: torch.nn.Module) -> TrainerCallback | None:
        """Return a callback that updates this model while the policy trains, or None if the model stays fixed."""
        return None

    def save(self, checkpoint: str | Path, write: Callable[..., Any] = save_file) -> None:  # noqa: B027
        """Write the model into the folder ``checkpoint``, unless a resumed run makes an equal model by itself."""

    def load(self, checkpoint: str | Path) -> None:  # noqa: B027
        """Read the file that `save` wrote into the folder ``checkpoint``, if the file exists."""


class FrozenModel(SecondModel):
    """A second model without gradients. With ``offload`` its weights stay in host memory between uses."""

    def __init__(self, model: torch.nn.Module, device: torch.device, offload: bool) -> None:
        self.model: Any = model
        self.device, self.offload = device, offload

    @contextmanager
    def present(self) -> Iterator[torch.nn.Module]:
        # No wait is needed: one CUDA stream runs these copies before the model's kernels.
        moved = (
            (parameter, torch.empty_like(parameter, device=self.device).copy_(parameter, non_blocking=True))
            for parameter in self.model.parameters()
        )
        with torch.no_grad(), values_in_place(moved if self.offload else ()):
            yield self.model

    def where(self) -> str:
        nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        place = "in host memory between uses" if self.offload else "beside it"
        return f"{place} ({nbytes / 2**20:,.0f} MiB)"


@contextmanager
def values_in_place(values: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    own: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    try:
        for parameter, value in values:
            own.append((parameter, parameter.data))
            parameter.data = value
        yield
    finally:
        for parameter, value in own:
            parameter.data = value


def offloads(config: GRPOConfig, setting: bool) -> bool:
    """Return whether a second model's weights go to the GPU only while it computes. False in a run on the CPU."""
    return setting and not config.on_cpu


def prepared(row: PackedRow) -> MicroBatch:
    """Return a row's `MicroBatch` without data for the policy alone, such as the experts that vLLM's router chose."""
    batch = collate(row)
    return dataclasses.replace(batch, riders=tuple(rider for rider in batch.riders if not rider.OF_POLICY))


def own_logprobs(second: SecondModel, model: Any, row: PackedRow, temperature: float, name: str = "") -> torch.Tensor:
    return policy_logprobs(model, prepared(row), temperature)[0]


class Kind(NamedTuple):
    field: str  # Name of the values that the model computes for a row, e.g. "ref_logprobs".
    name: str  # Name in the memory plan, e.g. "reference".
    make: Callable[[GRPOConfig, Policy], SecondModel]  # Makes the model, when the policy is on its device.
    nbytes: Callable[[GRPOConfig, Policy], int]  # Bytes of the model on the policy's device, before sharding.
    # Computes a row's values. Arguments: second model, module from `present()`, row, temperature, key in `configs`.
    read: Callable[[SecondModel, Any, PackedRow, float, str], torch.Tensor] = own_logprobs
    # Returns {name: configuration} for each model of this kind. A single model has the name "".
    configs: Callable[[GRPOConfig], Mapping[str, GRPOConfig]] = lambda config: {"": config}


OF = " of "
SecondModels = dict[str, SecondModel]  # Keys: a `Kind.field`, with a name if models have names: "teacher_top of math".


def kinds() -> dict[str, Kind]:
    return {kind.field: kind for kind in registry.hooks("second_model")}


def second_models(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> SecondModels:
    found, of_rows = {}, [step for step in steps_of(unwrap(policy.model)) if step.of_rows]
    for key, kind, each in _of_run(needs, config):
        second = found[key] = kind.make(each, policy)
        present = {type(step) for step in steps_of(unwrap(second.model))}
        for step in of_rows:
            if type(step) not in present:
                install(second.model, step)
    return found


def _of_run(needs: Sequence[str], config: GRPOConfig) -> Iterator[tuple[str, Kind, GRPOConfig]]:
    for field in needs:
        kind = kinds()[field]
        for name, own in kind.configs(config).items():
            yield f"{field}{OF}{name}" if name else field, kind, own


def second_model_bytes(needs: Sequence[str], config: GRPOConfig, policy: Policy) -> dict[str, int]:
    """Return a dict from `Kind.name` to the bytes of its models on the policy's device, before sharding."""
    nbytes = Counter[str]()
    for _, kind, each in _of_run(needs, config):
        nbytes[kind.name] += kind.nbytes(each, policy)
    return nbytes


@torch.no_grad()
def fill(models: SecondModels, rows: Sequence[PackedRow], temperature: float) -> tuple[PackedRow, ...]:
    for key, second in models.items() if rows else ():
        field, _, name = key.partition(OF)
        with second.present() as model:
            read = kinds()[field].read
            values = [read(second, model, row, temperature, name) for row in rows]
        rows = [row.with_scores(field, own) for row, own in zip(rows, values, strict=True)]
    return tuple(rows)


def with_second_logprobs(
    models: SecondModels, steps: Sequence[StepBatch], temperature: float,
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[StepBatch]:  # fmt: skip
    """Return ``steps`` with the values of all second models in their rows. All ranks must call this (a collective).

    Only rows that aren't trained yet are computed: trained rows have the values already.
    """
    untrained = tuple(row for step in steps for row in step.rows[step.trained :])
    for key, second in models.items():
        with on_all_ranks("the second models' log-probabilities"), phase(key.partition(OF)[0]), autocast():
            untrained = fill({key: second}, untrained, temperature)
    rows = iter(untrained)
    return [
        dataclasses.replace(
            step, rows=step.rows[: step.trained] + tuple(itertools.islice(rows, len(step.rows) - step.trained))
        )
        for step in steps
    ]

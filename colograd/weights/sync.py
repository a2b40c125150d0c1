"""`WeightSync`, the interface of weight syncs, and implementations that share memory with the engine or copy weights.

`MergedWeights` adds the adapter's product (scaling * B @ A) to the base weight in float32, layer by layer, and rounds
the sum once. Merging into the policy's own weights would accumulate rounding errors.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ..engine.protocol import Engine
from ..engine.tensors import VLLMTensors
from ..parallel import watchdog
from ..policy.lora import adapted_layers, packed_weights, trained_copies
from .mapping import Slice


class WeightSync(Protocol):
    """The interface of weight syncs, which give the engine the policy's weights. Users may write one."""

    @abstractmethod
    def publish(self, version: int) -> int:
        """Give the engine the policy's present weights, and call `Engine.stamp` with ``version``.

        Args:
            version: number of optimizer steps that the policy has been trained for.

        Returns:
            Number of bytes written into the engine's tensors.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the log at start, e.g. the kind of sync, the number of tensors, and bytes per sync."""

    @abstractmethod
    def differing(self) -> list[str]:
        """Compare policy and engine bit for bit in the narrower dtype. Return names of parameters that differ."""


class Unserved(ValueError):
    """The error of a LoRA adapter that vLLM can't serve, e.g. because a layer has no LoRA slot."""


class PlannedSync(WeightSync):
    """A `WeightSync` planned at start. `publish` checks that no parameter has changed its memory address since then."""

    def __init__(self, policy: torch.nn.Module, engine: Engine) -> None:
        self.engine, self._policy = engine, policy
        self._planned = self._addresses()

    def publish(self, version: int) -> int:
        """Write the policy's weights into the engine, and stamp it with ``version``.

        After a failed publish the engine refuses to sample."""
        self.engine.invalidate()
        addresses = self._addresses()
        if addresses != self._planned:
            moved = [name for name in self._planned | addresses if self._planned.get(name) != addresses.get(name)]
            raise RuntimeError(
                f"{len(moved)} weights have moved since publishing was planned ({', '.join(moved[:3])}): a reload, "
                "`.to()` or `.data =` has replaced tensors of the policy or the engine. The engine would sample with "
                "outdated weights. Change weights in place (`copy_`), or build a new trainer."
            )
        written = self.write()
        self.engine.stamp(version)
        return written

    @abstractmethod
    def write(self) -> int:
        """Write the policy's weights into the engine's tensors. Return the number of bytes written."""

    def _addresses(self) -> dict[str, int]:
        sides = (("policy", dict(self._policy.named_parameters())), ("engine", self.engine.tensors.parameters()))
        return {f"{side} {name}": p.data_ptr() for side, tensors in sides for name, p in tensors.items()}


@torch.no_grad()
def copy(slices: Sequence[Slice]) -> int:
    if plain := [part for part in slices if not part.is_computed]:
        torch._foreach_copy_([part.destination for part in plain], [part.held for part in plain])
    for part in slices:
        if part.is_computed:  # Computed values are copied one by one, to save memory.
            part.destination.copy_(part.held)
    return nbytes(slices)


def nbytes(slices: Sequence[Slice]) -> int:
    return sum(part.destination.nbytes for part in slices)


class CopiedWeights(PlannedSync):
    """Weight sync that copies the policy into the engine. ``why`` is the reason why memory isn't shared."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        super().__init__(policy, engine)
        self.slices, self.why = list(slices), why
        self.due = self.slices  # Slices that the next `publish` copies. Frozen weights are copied once.
        self._later = [part for part in slices if changes(part)]

    def describe(self) -> str:
        size = f"{nbytes(self.slices) / 2**20:,.0f} MiB per publish"
        return f"weights: copied, {len(self.slices)} parameters, {size} ({self.why})"

    def write(self) -> int:
        due, self.due = self.due, self._later
        return copy(due)

    def differing(self) -> list[str]:
        return [part.name for part in self.slices if not part.equal()]


def changes(part: Slice) -> bool:
    is_parameter = isinstance(part.source, torch.nn.Parameter)  # Buffers may change without the optimizer.
    return part.adapted is not None or part.source.requires_grad or not is_parameter


class MergedWeights(CopiedWeights):
    """Weight sync that merges a PeftModel's adapter into the engine's copy. ``why`` is the reason for merging."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        adapted = {layer.parameter: layer for layer in adapted_layers(policy)}
        copies, parts = dict(trained_copies(policy)), []
        for part in slices:
            name = part.plain_name
            source = copies.get(name, part.source)
            parts.append(dataclasses.replace(part, name=name, source=source, adapted=adapted.get(name)))
        super().__init__(policy, engine, parts, why)
        self.moving = [part for part, new in zip(slices, parts, strict=True) if changes(new)]

    def describe(self) -> str:
        return (
            f"weights: copied, {len(self.moving)} tensors, {nbytes(self._later) / 2**20:,.1f} MiB per publish "
            f"(the adapter is merged on its way into the engine's copy: {self.why})"
        )


def obstacle(part: Slice) -> str:
    """Return the reason why the policy's parameter can't be a view of the engine's tensor; "" if it can be a view."""
    source, place = part.source, part.destination
    if part.packed is not None:
        return "the policy has it quantised"
    if part.through is not None:
        return "the engine has a function of it"
    if part.rows is not None:
        return "the engine has its rows in another order"
    if part.again:
        return "the engine has it twice"
    if source.dtype != place.dtype:
        policy_dtype, engine_dtype = (str(tensor.dtype).removeprefix("torch.") for tensor in (source, place))
        return f"the engine has it in {engine_dtype}, the policy in {policy_dtype}"
    if source.shape != place.shape:
        return f"its shape is {tuple(place.shape)} in the engine, {tuple(source.shape)} in the policy"
    if source.stride() != place.stride():
        return f"its strides are {place.stride()} in the engine, {source.stride()} in the policy"
    return ""


@torch.no_grad()
def bind(slices: Sequence[Slice]) -> None:
    for part in slices:
        part.destination.copy_(part.source)
        part.source.data = part.destination


class SharedWeights(CopiedWeights):
    """Weight sync whose ``shared`` parameters are views of the engine's tensors. All other parameters are copied:
    ``copied`` has pairs of a parameter's slice and the reason why it isn't shared."""

    def __init__(
        self, policy: torch.nn.Module, engine: Engine, shared: Sequence[Slice], copied: Sequence[tuple[Slice, str]] = ()
    ) -> None:
        super().__init__(policy, engine, [part for part, _ in copied], why=copied[0][1] if copied else "")
        self.shared, self.copied = list(shared), list(copied)
        self.slices = [*self.shared, *self.slices]
        if unbound := [part.name for part in self.shared if part.source.data_ptr() != part.destination.data_ptr()]:
            raise RuntimeError(
                f"{len(unbound)} parameters were moved out of the engine's memory ({', '.join(unbound[:3])}): set "
                "`weights: copied`."
            )

    def describe(self) -> str:
        size = f"{len(self.shared)} parameters ({nbytes(self.shared) / 2**20:,.0f} MiB)"
        line = f"weights: shared, {size} are views of the engine's tensors, 0 bytes per publish"
        if self.copied:
            line += f"; {len(self.copied)} copied, {nbytes(self.due):,} bytes ({self.copied[0][0].name}: {self.why})"
        return line


def bytes_apart(policy: torch.nn.Module, engine: VLLMTensors) -> int:
    """Count the bytes of policy parameters outside the engine's tensors, including the scales of quantised weights."""
    shared = {parameter.untyped_storage().data_ptr() for parameter in engine.parameters().values()}
    packed = packed_weights(policy)
    return sum(
        packed[name].nbytes if name in packed else p.nbytes
        for name, p in policy.named_parameters()
        if p.untyped_storage().data_ptr() not in shared
    )


def state_dict_on_host(
    model: torch.nn.Module, places: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copy the model's state dict to host memory, into tensors of ``places`` (by name) if shape and dtype fit. Tied
    parameters share a tensor. All others have separate storages, because `save_pretrained` would clone shared ones."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    host: dict[str, torch.Tensor] = {}
    queued = False
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            place = (places or {}).get(name)
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                copies[key] = tensor.detach().to("cpu", copy=True)
            else:
                copies[key] = place.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                queued |= tensor.is_cuda
            watchdog.progress()
        host[name] = copies[key]
    if queued:  # waits for the GPU's copies, because the caller may read the tensors at once
        torch.cuda.synchronize()
    return host

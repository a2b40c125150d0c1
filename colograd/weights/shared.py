"""`shared`: the policy's parameters are slices of the engine's own tensors, into which the optimizer writes; a publish
moves only those that can't be shared (another dtype, say)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch

from ..engine.protocol import Engine, EngineTensors
from ..parallel import watchdog
from ..parallel.shards import Shard
from ..policy.quantized_layers import packed_weights
from .copied import CopiedWeights
from .mapping import Slice


def obstacle(part: Slice) -> str:
    """Why this parameter can't be a view of its slice; empty: it can."""
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
        ours, theirs = (str(tensor.dtype).removeprefix("torch.") for tensor in (source, place))
        return f"the engine has it in {theirs}, the policy in {ours}"
    if source.shape != place.shape:
        return f"its shape is {tuple(place.shape)} in the engine, {tuple(source.shape)} in the policy"
    if source.stride() != place.stride():
        return f"its strides are {place.stride()} in the engine, {source.stride()} in the policy"
    return ""


@torch.no_grad()
def bind(slices: Sequence[Slice]) -> None:
    """Turn each source into a view of its destination, which takes the source's value. The parameter objects stay, and
    with them ties; storage is freed one parameter at a time, so that no second copy of the model comes about."""
    for part in slices:
        part.destination.copy_(part.source)
        part.source.data = part.destination


def parts(slices: Sequence[Slice]) -> list[tuple[Slice, Shard]]:
    """Of each parameter its place in this rank of the engine, and the part of it that lies there.

    Raises:
        ValueError: one can't be a view of its place.
    """
    found = []
    for name, group in itertools.groupby(slices, key=lambda part: part.name):
        of_name = list(group)
        source = of_name[0].source
        shard = Shard.of_cuts(source.shape, [part.cut for part in of_name])
        place = _joined([part.destination for part in of_name], shard)
        part = dataclasses.replace(of_name[0], destination=place, cut=())
        wanted = dataclasses.replace(part, source=torch.empty(shard.local_shape, dtype=source.dtype, device="meta"))
        if reason := next((obstacle(one) for one in of_name if one.again), "") or obstacle(wanted):
            raise ValueError(f"sharding: tensor can't be had for {name} ({reason}): set sharding: gradients or fsdp.")
        found.append((part, shard))
    return found


def _joined(places: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """Neighbouring views of one tensor as one view."""
    first, *others = places
    at = first
    for other in others:
        after = at.storage_offset() + at.shape[shard.axis] * at.stride(shard.axis)
        assert other.storage_offset() == after and other.stride() == first.stride(), "the parts aren't neighbours"
        at = other
    return first.as_strided(shard.local_shape, first.stride()) if others else first


@torch.no_grad()
def bind_parts(found: Sequence[tuple[Slice, Shard]]) -> None:
    """`bind` where the engine's rank has parts: what the policy has beside them is freed."""
    for part, shard in found:
        part.destination.copy_(shard.of(part.source.detach()))
        part.source.data = part.destination


class SharedWeights(CopiedWeights):
    """The policy lives in the engine's memory, bound to it already (`bind`), but for what is ``copied``, each with the
    reason.

    Raises:
        RuntimeError: a parameter among ``shared`` isn't bound.
    """

    def __init__(
        self, policy: torch.nn.Module, engine: Engine, shared: Sequence[Slice], copied: Sequence[tuple[Slice, str]] = ()
    ) -> None:
        super().__init__(policy, engine, [part for part, _ in copied], why=copied[0][1] if copied else "")
        self.shared, self.copied = list(shared), list(copied)
        self.slices = [*self.shared, *self.slices]  # all parameters and their places
        apart = [part.name for part in self.shared if part.source.data_ptr() != part.destination.data_ptr()]
        if apart:
            raise RuntimeError(
                f"{len(apart)} parameters were bound to the engine's memory and have left it: {apart[:3]}."
            )

    def describe(self) -> str:
        nbytes = sum(part.destination.nbytes for part in self.shared)
        own = f"{len(self.shared)} parameters ({nbytes / 2**20:,.0f} MiB)"
        line = f"weights: shared, {own} are views of the engine's tensors, 0 bytes per publish"
        if self.copied:
            line += f"; {len(self.copied)} copied, {self.copies.nbytes:,} bytes ({self.copied[0][0].name}: {self.why})"
        return line


def bytes_apart(policy: torch.nn.Module, engine: EngineTensors) -> int:
    """Bytes of the policy's parameters that lie outside the engine's tensors; of quantised ones with their scales."""
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
    """The model's state dict with every tensor whole and by itself in host memory; tied ones stay one tensor. (On the
    device writers of safetensors would clone what lies in one storage.)

    Args:
        places: by name, where a tensor of the same shape and dtype is to be copied to.
    """
    seen: dict[tuple[int, torch.Size], torch.Tensor] = {}
    host: dict[str, torch.Tensor] = {}
    queued = False
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen:
            place = (places or {}).get(name)
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                seen[key] = tensor.detach().to("cpu", copy=True)
            else:
                seen[key] = place.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                queued |= tensor.is_cuda
            watchdog.progress()
        host[name] = seen[key]
    if queued:  # and not later, with the other files: transformers may compute what it writes from these
        torch.cuda.synchronize()
    return host

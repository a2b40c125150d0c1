"""The weight sync `shared`: parameters are views of the engine's tensors. Unshareable ones are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..engine.protocol import Engine, EngineTensors
from ..parallel import watchdog
from ..policy.packed_weights import packed_weights
from .copied import CopiedWeights
from .mapping import Slice


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
    """Copy each parameter into its engine tensor, and make the parameter a view of that tensor, one by one."""
    for part in slices:
        part.destination.copy_(part.source)
        part.source.data = part.destination


class SharedWeights(CopiedWeights):
    """The weight sync of a policy with parameters that share the engine's memory; some are copied.

    Args:
        shared: parameters that `bind` has made views of the engine's tensors.
        copied: parameters that can't be views, each with the reason.
    """

    def __init__(
        self, policy: torch.nn.Module, engine: Engine, shared: Sequence[Slice], copied: Sequence[tuple[Slice, str]] = ()
    ) -> None:
        super().__init__(policy, engine, [part for part, _ in copied], why=copied[0][1] if copied else "")
        self.shared, self.copied = list(shared), list(copied)
        self.slices = [*self.shared, *self.slices]  # shared and copied parameters
        unbound = [part.name for part in self.shared if part.source.data_ptr() != part.destination.data_ptr()]
        if unbound:
            raise RuntimeError(
                f"{len(unbound)} policy parameters don't share the engine's memory any more: {', '.join(unbound[:3])}."
            )

    def describe(self) -> str:
        nbytes = sum(part.destination.nbytes for part in self.shared)
        size = f"{len(self.shared)} parameters ({nbytes / 2**20:,.0f} MiB)"
        line = f"weights: shared, {size} are views of the engine's tensors, 0 bytes per publish"
        if self.copied:
            line += f"; {len(self.copied)} copied, {self.copies.nbytes:,} bytes ({self.copied[0][0].name}: {self.why})"
        return line


def bytes_apart(policy: torch.nn.Module, engine: EngineTensors) -> int:
    """Return the bytes of policy parameters outside the engine's tensors, including the scales of quantised weights."""
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
    """Copy the model's state dict to host memory, into tensors of ``places`` (by name) if shape and dtype fit.

    Tied parameters become one tensor. Other tensors share no storage, because writers of safetensors would copy them.
    """
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
    if queued:  # waits for the copies, because transformers may read the tensors at once
        torch.cuda.synchronize()
    return host

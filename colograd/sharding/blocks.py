"""A model as blocks whose weights `fully_shard` gathers and whose gradients it reduces, each in one exchange."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..parallel import watchdog
from ..parallel.ranks import world_size
from ..parallel.shards import all_gather
from ..policy.images import keep_gradients_out, tower_layers
from ..policy.layers import decoder_layers
from ..runtime.page_locked import host_empty
from .buckets import reduce_scatter


class Exchange(NamedTuple):
    """One collective of a forward or a backward."""

    block: FSDPModule
    summed: int = 0  # elements of gradients that are summed; 0: weights are gathered

    def answer(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take part in it as one that has nothing to add: with its weights, or with zeros."""
        if not self.summed:
            self.block.unshard()
            self.block.reshard()
            return
        zeros = torch.zeros(self.summed, dtype=dtype, device=device)
        reduce_scatter(torch.empty(self.summed // world_size(), dtype=dtype, device=device), zeros)


class Blocks(NamedTuple):
    """The blocks of a model."""

    root: Any  # the model itself, with what lies outside of the others
    decoder: list[Any]
    embedding: list[Any]  # of the input; none where it is the head too, which is then the root's
    head: list[Any]
    tower: list[Any]  # that sees pictures

    @property
    def layers(self) -> list[Any]:
        """In the order of a forward."""
        return [*self.tower, *self.decoder]

    def all(self) -> list[Any]:
        """In the order of a forward."""
        return [self.root, *self.embedding, *self.layers, *self.head]

    def backward(self, sizes: Mapping[Any, int], reshard: bool) -> Iterator[Exchange]:
        """The exchanges of a backward, in which a block's weights are gathered one block ahead; ``sizes`` are elements
        of each block's gradients. Root and embedding come last, as their input has no gradient; a frozen tower never.
        """
        layers = [*reversed(self.decoder), *(block for block in reversed(self.tower) if sizes[block])]
        gathers = [Exchange(block) for block in layers if reshard]
        sums = [Exchange(block, sizes[block]) for block in (*self.head, *layers)]
        ahead = 1 - len(self.head)
        yield from gathers[:ahead]
        for pair in itertools.zip_longest(gathers[ahead:], sums):
            yield from filter(None, pair)
        yield from (Exchange(block, sizes[block]) for block in (self.root, *self.embedding))


class Listener(Protocol):
    """Whoever is told of each exchange."""

    def on_gather(self, block: FSDPModule, whole: torch.Tensor) -> None:
        """A block's weights are about to be gathered into ``whole``."""

    def on_reduce(self, block: FSDPModule, whole: torch.Tensor) -> None:
        """A block's gradients ``whole`` are about to be summed over ranks."""

    def take(self, own: torch.Tensor) -> None:
        """They were, and this rank's rows of them are ``own``."""


@dataclass(eq=False, slots=True)
class _Comm:
    block: FSDPModule
    listener: Listener

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.listener.on_gather(self.block, output_tensor)
        work: dist.Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _Reduce(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.listener.on_reduce(self.block, input_tensor)
        work: dist.Work | None = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self.listener.take(output_tensor)
        return work


def cut(
    model: torch.nn.Module,
    device: torch.device,
    listener: Listener,
    gradients: torch.dtype,
    reshard: bool = True,
    offload: bool = False,
) -> Blocks:
    """Cut the parameters by rows, in place, and bring each rank's to ``device``.

    Args:
        gradients: the dtype in which they are summed.
        reshard: forget a block's weights after its forward, and gather them again for its backward.
        offload: to page-locked host memory instead.

    Raises:
        ValueError: it can't be cut so.
    """
    tower: Any = tower_layers(model)
    decoder: Any = decoder_layers(model.get_decoder() if tower else model)
    blocks = Blocks(model, decoder, *ends(model), tower)
    check_blocks(model, blocks.layers)
    rule: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (world_size(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=gradients),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
    }

    def shard(module: Any, reshard_after_forward: bool) -> Any:
        fully_shard(module, reshard_after_forward=reshard_after_forward, **rule)
        if offload:
            _lock_rows(module, device)
        return module

    for module in blocks.layers:
        shard(module, reshard)
    if not any(parameter.requires_grad for module in blocks.tower for parameter in module.parameters()):
        keep_gradients_out(blocks.tower)
        for module in blocks.tower:
            module.set_unshard_in_backward(False)  # else the last one is gathered beside the decoder's first
    for module in blocks.embedding:
        shard(module, True).set_unshard_in_backward(False)
    # The backwards of head and root begin where their forwards end: nothing is gained by forgetting these in between.
    for module in (*blocks.head, model):
        shard(module, False)
    for block in blocks.all():
        block.set_gradient_divide_factor(1.0)  # a sum: losses are divided by the whole step's denominator
        block.set_force_sum_reduction_for_comms(True)
        alike = all(parameter.dtype == gradients for parameter in block.parameters())
        if alike and hasattr(block, "set_reduce_scatter_unused_params"):
            block.set_reduce_scatter_unused_params(True)  # torch's zeros are of the parameter's own dtype
        block.set_custom_all_gather(_Gather(block, listener))
        block.set_custom_reduce_scatter(_Reduce(block, listener))
    return blocks


def _lock_rows(block: Any, device: torch.device) -> None:
    """Bring this rank's rows of a block to page-locked host memory: torch's own would have sizes of powers of two."""
    group = block._get_fsdp_state()._fsdp_param_group
    for one in group.fsdp_params if group is not None else ():
        watchdog.progress()
        padded, own = one._sharded_param_data, one.sharded_param._local_tensor
        place = host_empty(padded.shape, padded.dtype, device).copy_(padded)
        one._sharded_param_data = place
        one.sharded_param._local_tensor = place[: own.numel()].view(own.shape)


def whole_parameters(block: Any) -> list[torch.nn.Parameter]:
    """The parameters of which each pass makes the gradients, without memory in between. A collective."""
    block.unshard()
    whole = [parameter for parameter in block.parameters() if not isinstance(parameter, DTensor)]
    block.reshard()
    return whole


def ends(model: Any) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The embedding of the input and the head, as blocks of their own, unless they are one tensor."""
    if not hasattr(model, "get_input_embeddings"):
        return [], []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight:
        return [], []
    return [embedding], [head]


def check_blocks(model: torch.nn.Module, decoder: Sequence[torch.nn.Module]) -> None:
    """Refuse what `fully_shard` would stumble over later, or on some ranks only."""
    remedy = "set sharding: gradients, which cuts gradients and optimizer state alone."
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(f"sharding is 'fsdp', but {name} is a single number and has no rows to cut: {remedy}")
    for block in decoder:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in block.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"sharding is 'fsdp', but a {type(block).__name__} has parameters in {' and '.join(sorted(dtypes))}, "
                f"whose gradients can't be summed in one exchange: {remedy}"
            )

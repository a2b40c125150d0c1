"""The blocks of a model: `fully_shard` gathers a block's weights, and reduces its gradients, in one exchange each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...parallel import watchdog
from ...parallel.ranks import world_size
from ...parallel.shards import all_gather
from ...policy.layers import decoder_layers
from ...policy.towers import keep_gradients_out, tower_layers
from ...runtime.page_locked import host_empty
from ...sharding.buckets import reduce_scatter


class Exchange(NamedTuple):
    block: FSDPModule
    summed: int = 0  # number of gradient elements that are summed; 0: the exchange gathers weights

    def answer(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take part in the exchange after a failure: with this rank's weights, or with zeros as gradients."""
        if not self.summed:
            self.block.unshard()
            self.block.reshard()
            return
        zeros = torch.zeros(self.summed, dtype=dtype, device=device)
        reduce_scatter(torch.empty(self.summed // world_size(), dtype=dtype, device=device), zeros)


class Blocks(NamedTuple):
    root: Any  # the model itself, with the parameters outside of all other blocks
    decoder: list[Any]
    embedding: list[Any]  # the input embedding; empty if it is tied to the head, which is then part of the root
    head: list[Any]
    tower: list[Any]  # layers of the vision tower

    @property
    def layers(self) -> list[Any]:
        return [*self.tower, *self.decoder]

    def all(self) -> list[Any]:
        return [self.root, *self.embedding, *self.layers, *self.head]

    def backward(self, sizes: Mapping[Any, int], reshard: bool) -> Iterator[Exchange]:
        """Yield the exchanges of a backward. A block's weights are gathered one block ahead.

        Root and embedding come last, as their input has no gradient. A frozen tower has no exchange.

        Args:
            sizes: number of gradient elements of each block.
            reshard: blocks free their weights after the forward, so that the backward gathers them again.
        """
        layers = [*reversed(self.decoder), *(block for block in reversed(self.tower) if sizes[block])]
        gathers = [Exchange(block) for block in layers if reshard]
        sums = [Exchange(block, sizes[block]) for block in (*self.head, *layers)]
        ahead = 1 - len(self.head)
        yield from gathers[:ahead]
        for pair in itertools.zip_longest(gathers[ahead:], sums):
            yield from filter(None, pair)
        yield from (Exchange(block, sizes[block]) for block in (self.root, *self.embedding))


@dataclass(eq=False, slots=True)
class _Comm:
    block: FSDPModule
    strategy: Any  # a `FullySharded`, which is called at each exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.strategy.on_gather(self.block, output_tensor)
        work: dist.Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _Reduce(_Comm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.strategy.on_reduce(self.block, input_tensor)
        work: dist.Work | None = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self.strategy.take(output_tensor)
        return work


def cut(
    model: torch.nn.Module,
    device: torch.device,
    strategy: Any,
    gradients: torch.dtype,
    reshard: bool = True,
    offload: bool = False,
) -> Blocks:
    """Cut the parameters by rows, in place, and move each rank's rows to ``device``. See `FullySharded`.

    Args:
        strategy: is called at each exchange.
        gradients: the dtype of gradient sums.
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
        group = module._get_fsdp_state()._fsdp_param_group
        # The rows go to page-locked host memory, whose sizes torch would round up to powers of two.
        for parameter in group.fsdp_params if offload and group is not None else ():
            watchdog.progress()
            padded, rows = parameter._sharded_param_data, parameter.sharded_param._local_tensor
            place = host_empty(padded.shape, padded.dtype, device).copy_(padded)
            parameter._sharded_param_data = place
            parameter.sharded_param._local_tensor = place[: rows.numel()].view(rows.shape)
        return module

    for module in blocks.layers:
        shard(module, reshard)
    if not any(parameter.requires_grad for module in blocks.tower for parameter in module.parameters()):
        keep_gradients_out(blocks.tower)
        for module in blocks.tower:
            module.set_unshard_in_backward(False)  # else its last layer is gathered with the decoder's first
    for module in blocks.embedding:
        shard(module, True).set_unshard_in_backward(False)
    # The backwards of head and root follow their forwards at once, so freeing their weights in between gains nothing.
    for module in (*blocks.head, model):
        shard(module, False)
    for block in blocks.all():
        block.set_gradient_divide_factor(1.0)  # a sum: losses are divided by the whole step's denominator
        block.set_force_sum_reduction_for_comms(True)
        has_dtype = all(parameter.dtype == gradients for parameter in block.parameters())
        if has_dtype and hasattr(block, "set_reduce_scatter_unused_params"):
            block.set_reduce_scatter_unused_params(True)  # torch creates its zeros in the parameter's dtype
        block.set_custom_all_gather(_Gather(block, strategy))
        block.set_custom_reduce_scatter(_Reduce(block, strategy))
    return blocks


def whole_parameters(block: Any) -> list[torch.nn.Parameter]:
    """Return the whole parameters that get gradients in each pass. Between passes they have no memory. A collective."""
    block.unshard()
    whole = [parameter for parameter in block.parameters() if not isinstance(parameter, DTensor)]
    block.reshard()
    return whole


def ends(model: Any) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return the input embedding and the head, as one block each; no blocks if they are one tensor."""
    if not hasattr(model, "get_input_embeddings"):
        return [], []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight:
        return [], []
    return [embedding], [head]


def check_blocks(model: torch.nn.Module, decoder: Sequence[torch.nn.Module]) -> None:
    """Check that `fully_shard` can cut the model. Its own errors come later, or on some ranks only."""
    remedy = "Set sharding: gradients, which cuts only gradients and optimizer state."
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(f"sharding is 'fsdp', but {name} is a single number and has no rows to cut. {remedy}")
    for block in decoder:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in block.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"sharding is 'fsdp', but a {type(block).__name__} has parameters in {' and '.join(sorted(dtypes))}. "
                f"Their gradients can't be summed in one exchange. {remedy}"
            )

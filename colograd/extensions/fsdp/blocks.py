"""Blocks of a model for FSDP2: an embedding, a layer, a head, or the model with its remaining parameters.

`fully_shard` gathers a block's weights in one exchange, and reduces a block's gradients in one exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ...parallel import watchdog
from ...parallel.ranks import world_size
from ...parallel.shards import all_gather
from ...policy.layers import decoder_layers
from ...policy.towers import keep_gradients_out, tower_layers
from ...runtime.page_locked import host_empty
from ...sharding.zero import reduce_scatter


class Exchange(NamedTuple):
    block: FSDPModule
    summed: int = 0  # Number of gradient elements in a reduce-scatter. 0 means an all-gather of weights.

    def answer(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take part in an exchange that other ranks wait for, after a failure of this rank. Send zeros as gradients."""
        if not self.summed:
            self.block.unshard()
            self.block.reshard()
            return
        zeros = torch.zeros(self.summed, dtype=dtype, device=device)
        reduce_scatter(torch.empty(self.summed // world_size(), dtype=dtype, device=device), zeros)


class Blocks(NamedTuple):
    root: Any  # The whole model as a block, for the parameters outside the other blocks.
    decoder: list[Any]
    embedding: list[Any]  # The input embedding. Empty for a tied embedding, which belongs to the root block.
    head: list[Any]
    tower: list[Any]  # Layers of the vision tower.

    @property
    def layers(self) -> list[Any]:
        return [*self.tower, *self.decoder]

    def all(self) -> list[Any]:
        return [self.root, *self.embedding, *self.layers, *self.head]

    def backward(self, sizes: Mapping[Any, int], reshard: bool) -> Iterator[Exchange]:
        """Yield the exchanges of a backward in the order in which FSDP makes them. A layer's weights are gathered while
        the layer after it is computed. Root and embedding come last, because their inputs have no gradient. A frozen
        tower has no exchange.

        Args:
            sizes: number of gradient elements of each block.
            reshard: whether layers free their weights after the forward, so that the backward gathers them again.
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
    """FSDP's all-gather of a block's weights and reduce-scatter of its gradients, with reports to the strategy."""

    block: FSDPModule
    strategy: Any  # The `FullySharded` strategy. Its `on_gather` or `on_reduce` is called at each exchange.

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any = None, async_op: Any = False
    ) -> dist.Work | None:
        work: dist.Work | None
        if op is None:
            self.strategy.on_gather(self.block, output_tensor)
            work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        else:
            self.strategy.on_reduce(self.block, input_tensor, output_tensor)
            work = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def cut(
    model: torch.nn.Module,
    device: torch.device,
    strategy: Any,
    gradients: torch.dtype,
    reshard: bool = True,
    offload: bool = False,
) -> Blocks:
    """Apply `fully_shard` to a model in place, block by block, for computation on ``device``.

    Args:
        strategy: the `FullySharded` strategy, which is called at each exchange.
        gradients: dtype of gradient sums.
        reshard: whether layers free their whole weights after a forward.
        offload: whether this rank's rows are moved to page-locked host memory, and not to ``device``.
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
        # Rows go to memory of `host_empty`, because torch would round sizes of page-locked memory up to powers of two.
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
            module.set_unshard_in_backward(False)  # The backward doesn't need a frozen tower's weights.
    for module in blocks.embedding:
        shard(module, True).set_unshard_in_backward(False)
    # The head and the root's own parameters stay whole after a forward, because the backward begins with the head.
    for module in (*blocks.head, model):
        shard(module, False)
    for block in blocks.all():
        block.set_gradient_divide_factor(1.0)  # Sums of gradients, because the step's denominator divides them later.
        block.set_force_sum_reduction_for_comms(True)
        has_dtype = all(parameter.dtype == gradients for parameter in block.parameters())
        if has_dtype and hasattr(block, "set_reduce_scatter_unused_params"):
            # torch's zeros for unused parameters have the parameters' dtype, so this needs sums of the same dtype.
            block.set_reduce_scatter_unused_params(True)
        block.set_custom_all_gather(_Comm(block, strategy))
        block.set_custom_reduce_scatter(_Comm(block, strategy))
    return blocks


def ends(model: Any) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return a list with the input embedding and a list with the head. Both are empty if the two share a tensor."""
    if not hasattr(model, "get_input_embeddings"):
        return [], []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight:
        return [], []
    return [embedding], [head]


def check_blocks(model: torch.nn.Module, decoder: Sequence[torch.nn.Module]) -> None:
    """Raise a ValueError if `fully_shard` can't shard the model. FSDP may raise later, or only on some ranks."""
    remedy = "Set sharding: gradients, which cuts only gradients and optimizer state."
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(f"With fsdp, {name} is a single number and has no rows to cut. {remedy}")
    for block in decoder:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in block.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"A {type(block).__name__} mixes the dtypes {' and '.join(sorted(dtypes))}, but sharding: fsdp sums "
                f"the gradients of a block in one exchange, with one dtype. {remedy}"
            )

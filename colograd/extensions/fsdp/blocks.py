"""Blocks of a model for FSDP2: `fully_shard` gathers a block's weights, or sums its gradients, in one exchange."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ...parallel import watchdog
from ...parallel.ranks import world_size
from ...policy.layers import decoder_layers
from ...policy.towers import keep_gradients_out, tower_layers
from ...runtime.page_locked import host_empty
from ...sharding.zero import reduce_scatter


class Exchange(NamedTuple):
    block: FSDPModule
    summed: int = 0  # Number of gradient elements of a reduce-scatter, or 0 for an all-gather of weights.

    def answer(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take part in an exchange after a failure of this rank, because other ranks wait for the exchange."""
        if not self.summed:
            self.block.unshard()
            self.block.reshard()
            return
        zeros = torch.zeros(self.summed, dtype=dtype, device=device)
        reduce_scatter(torch.empty(self.summed // world_size(), dtype=dtype, device=device), zeros)


class Blocks(NamedTuple):
    root: Any  # The model, as the block of all parameters that no other block has.
    decoder: list[Any]
    embedding: list[Any]  # Empty if the embedding and the head are tied: then they belong to the root.
    head: list[Any]
    tower: list[Any]

    @property
    def layers(self) -> list[Any]:
        return [*self.tower, *self.decoder]

    def all(self) -> list[Any]:
        return [self.root, *self.embedding, *self.layers, *self.head]

    def backward(self, sizes: Mapping[Any, int], reshard: bool) -> Iterator[Exchange]:
        """Yield a backward's exchanges in FSDP's order. Weights are gathered one layer ahead of the computation."""
        layers = [*reversed(self.decoder), *(block for block in reversed(self.tower) if sizes[block])]
        gathers = [Exchange(block) for block in layers if reshard]
        sums = [Exchange(block, sizes[block]) for block in (*self.head, *layers)]
        ahead = 1 - len(self.head)
        yield from gathers[:ahead]
        for pair in itertools.zip_longest(gathers[ahead:], sums):
            yield from filter(None, pair)
        yield from (Exchange(block, sizes[block]) for block in (self.root, *self.embedding))


class _Comm(functools.partial):
    """A function that runs a collective, with the method `allocate` that FSDP calls."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def cut(
    model: Any, device: torch.device, exchange: Callable[..., Any], gradients: torch.dtype, reshard: bool = True,
    offload: bool = False,
) -> Blocks:  # fmt: skip
    """Apply `fully_shard` to a model in place, block by block.

    ``exchange`` runs a block's collective. ``gradients``: dtype of gradient sums. ``reshard``: whether layers free
    their gathered weights after a forward. ``offload``: whether rows move to page-locked host memory."""
    tower: Any = tower_layers(model)
    decoder: Any = decoder_layers(model.get_decoder() if tower else model)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    are_apart = None not in ends and ends[0].weight is not ends[1].weight
    blocks = Blocks(model, decoder, [ends[0]] if are_apart else [], [ends[1]] if are_apart else [], tower)
    check_blocks(model, blocks.layers)
    rule: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (world_size(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=gradients),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
    }

    def shard(module: Any, reshard_after_forward: bool) -> Any:
        fully_shard(module, reshard_after_forward=reshard_after_forward, **rule)
        group = module._get_fsdp_state()._fsdp_param_group
        # Not torch's page-locked memory, because torch rounds its sizes up to powers of two.
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
            module.set_unshard_in_backward(False)
    for module in blocks.embedding:
        shard(module, True).set_unshard_in_backward(False)
    # The head and the root stay gathered after a forward, because the backward begins with the head.
    for module in (*blocks.head, model):
        shard(module, False)
    for block in blocks.all():
        block.set_gradient_divide_factor(1.0)  # Only sum here: `divide_gradients` divides later.
        block.set_force_sum_reduction_for_comms(True)
        has_dtype = all(parameter.dtype == gradients for parameter in block.parameters())
        if has_dtype and hasattr(block, "set_reduce_scatter_unused_params"):
            # Only if gradients are summed in the parameters' dtype: torch adds zeros of this dtype for unused ones.
            block.set_reduce_scatter_unused_params(True)
        block.set_custom_all_gather(_Comm(exchange, block))
        block.set_custom_reduce_scatter(_Comm(exchange, block))
    return blocks


def check_blocks(model: torch.nn.Module, decoder: Sequence[torch.nn.Module]) -> None:
    """Raise a ValueError for parameters that FSDP can't shard. FSDP would raise later, or only on some ranks."""
    remedy = "Set sharding: gradients, which cuts only gradients and optimizer state."
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(f"`sharding: fsdp` cuts parameters into rows, but {name} is a single number. {remedy}")
    for block in decoder:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in block.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"A {type(block).__name__} mixes the dtypes {' and '.join(sorted(dtypes))}, but `sharding: fsdp` sums "
                f"the gradients of a block in one exchange, with one dtype. {remedy}"
            )

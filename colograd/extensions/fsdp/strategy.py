"""FSDP2 (`fully_shard`): ranks shard the policy's weights, gradients and optimizer state by rows.

The optimizer updates plain tensors: this rank's rows, in the memory that torch gathers from. Ranks exchange weights
inside forwards and backwards. So a rank that fails there still takes part in the remaining exchanges, because other
ranks wait for them."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...config import GRPOConfig
from ...parallel.faults import telling
from ...parallel.ranks import on_all_ranks, rank
from ...parallel.shards import all_gather, gradient_dtype
from ...sharding.strategy import Owned
from ...sharding.weight_files import WeightFiles, all_names, completed
from ...sharding.zero import SharedParts, reduce_scatter
from .blocks import Blocks, Exchange, cut
from .rows import Cut, cuts_of, gathered

FORWARD, BACKWARD = "forward", "backward"


class FullySharded(SharedParts):
    """Sharding strategy `fsdp`: each rank has some rows of every parameter, with their gradients and optimizer state.

    ``model`` is sharded in place, and computes on ``device`` (None: the model's device). ``reshard``: whether layers
    free their gathered weights after a forward. ``offload``: whether rows stay in page-locked host memory (not if
    ``device`` is a CPU)."""

    meets_in_backward = True
    device: Any = None

    def __init__(
        self, model: torch.nn.Module, device: torch.device | None = None, reshard: bool = True, offload: bool = False
    ) -> None:
        super().__init__(model)
        self.device = device or next(model.parameters()).device
        self._reshard, self._offload = reshard, offload and self.device.type != "cpu"
        dtypes = (gradient_dtype(p) for p in model.parameters() if p.requires_grad)
        self._gradients = max(dtypes, key=lambda dtype: dtype.itemsize)
        self._exchanges: list[Exchange] = []
        # Exchanges of each model's forward and backward. A rank that fails still takes part in them all.
        self._pattern: dict[tuple[torch.nn.Module, str], Sequence[Exchange]] = {}
        self._entered: dict[Any, None] = {}  # Models that have begun a forward.
        self._began = False
        # This rank's rows of one block's summed gradients, and how many elements the gradient hooks have read.
        self._summed, self._offset = torch.empty(0), 0
        self.blocks = self._cut(model, self._reshard)
        self._whole: list[Any] = []  # Whole trained parameters, with memory only during passes.
        for block in self.blocks.all():
            block.unshard()
            self._whole += [p for p in block.parameters() if p.requires_grad and not isinstance(p, DTensor)]
            block.reshard()
        for parameter in self._whole:
            parameter.grad_dtype = self._gradients  # A tied embedding adds two gradients: don't round the sum.
        self.cuts = cuts_of(model)
        self._pieces: dict[str, Owned] = {}
        # The root block comes first and contains all parameters. Later blocks replace it as owner of their parameters.
        owner = {id(p): block for block in self.blocks.all() for p in block.parameters()}
        self._sizes: dict[Any, int] = dict.fromkeys(self.blocks.all(), 0)  # gradient elements per block, with padding
        for one in self.cuts:
            parameter = model.get_parameter(one.name)
            if parameter.requires_grad:
                self._register(one, parameter)
                self._sizes[owner[id(parameter)]] += one.share * one.row * self.parts
        self._pattern[model, BACKWARD] = list(self.blocks.backward(self._sizes, self._reshard))
        self.traffic.take()  # Don't count the traffic of the start in the first step.

    @classmethod
    def for_run(cls, model: torch.nn.Module, config: GRPOConfig) -> FullySharded:
        return cls(model, config.device, config.fsdp_reshard_after_forward, config.fsdp_offload_params)

    def describe(self) -> str:
        elements = sum(one.shape.numel() for one in self.cuts)
        where = ", each in its host's memory" if self._offload else ""
        return (
            f"sharding: weights, gradients and optimizer state of {elements / 1e6:,.1f} M parameters in {self.parts} "
            f"parts, one per rank (FSDP2){where}; {len(self.blocks.all())} blocks, gathered one at a time"
        )

    def _cut(self, model: Any, reshard: bool) -> Blocks:
        blocks = cut(model, self.device, self._exchange, self._gradients, reshard, self._offload)
        self._pattern[model, FORWARD] = [Exchange(block) for block in blocks.all()]
        model.around_forward = functools.partial(self._forward, blocks)
        model.tower_in_each_forward = bool(blocks.tower)
        return blocks

    def share_frozen(self, model: torch.nn.Module) -> None:
        self._cut(model, reshard=True)

    def close(self) -> None:
        for model, kind in self._pattern:
            if kind == FORWARD:
                del model.around_forward, model.tower_in_each_forward

    def _register(self, one: Cut, parameter: torch.nn.Parameter) -> None:
        """Create an optimizer parameter in the memory of this rank's rows, and a hook that sets its gradient."""
        if one.local.numel():
            part = torch.nn.Parameter(one.local.view(-1))
            if part.dtype != self._gradients:
                part.grad_dtype = self._gradients
            start = one.rows_of(rank()).start * one.row
            self._pieces[one.name] = Owned(one.name, part, start, start + part.numel())

        def take(parameter: torch.Tensor) -> None:
            parameter.grad = None  # Use `_summed` instead: torch may have rounded this gradient.
            first, self._offset = self._offset, self._offset + one.share * one.row
            piece = self._pieces.get(one.name)
            if piece is not None:
                gradient = self._summed[first : first + piece.part.numel()].to(piece.part.device)
                piece.part.grad = gradient if piece.part.grad is None else piece.part.grad.add_(gradient)

        parameter.register_post_accumulate_grad_hook(take)

    def _exchange(
        self, block: FSDPModule, output_tensor: torch.Tensor, input_tensor: torch.Tensor, op: Any = None, **kwargs: Any
    ) -> Any:
        if op is None:
            self._exchanges.append(Exchange(block))
            self.traffic.gathered += output_tensor.nbytes
            return all_gather(output_tensor, input_tensor, **kwargs)
        if (size := input_tensor.numel()) != self._sizes[block]:
            raise RuntimeError(
                f"Gradients of a {type(block).__name__.removeprefix('FSDP')} have {size:,} elements, not "
                f"{self._sizes[block]:,}: the loss doesn't depend on one of this block's parameters. Freeze "
                "parameters that have no effect (requires_grad_(False)), or set sharding: gradients."
            )
        self._exchanges.append(Exchange(block, size))
        self.traffic.reduced += input_tensor.nbytes
        self._summed, self._offset = output_tensor, 0
        return reduce_scatter(output_tensor, input_tensor, op=op, **kwargs)

    @contextmanager
    def agree(self, what: str) -> Iterator[None]:
        self._began = False
        with on_all_ranks(what):
            try:
                yield
            except Exception as error:
                if not self._began:  # Other ranks run the forward. Take part in its exchanges.
                    with contextlib.suppress(Exception), self._forward(self.blocks):
                        raise error
                raise

    @contextmanager
    def _forward(self, blocks: Blocks) -> Iterator[None]:
        """Run a forward so that it fails on all ranks if it fails on one rank."""
        self._began = True
        with on_all_ranks("the forward"), self._answering(blocks.root, FORWARD):
            yield
        if not torch.is_grad_enabled():  # No backward follows, which would free the gathered weights.
            for block in blocks.all():
                block.reshard()

    def backward(self, loss: torch.Tensor) -> None:
        self._began = True
        with self._answering(self.model, BACKWARD):
            super().backward(loss)

    @contextmanager
    def _answering(self, model: torch.nn.Module, kind: str) -> Iterator[None]:
        self._exchanges.clear()
        try:
            yield
        except Exception as error:
            if self._exchanges:
                self._entered[model] = None
            traceback.clear_frames(error.__traceback__)  # Free memory for the remaining exchanges.
            for exchange in self._pattern[model, kind][len(self._exchanges) :]:
                exchange.answer(self.device, self._gradients)
            raise
        self._pattern[model, kind] = tuple(self._exchanges)
        self._entered[model] = None

    def sum_gradients(self) -> None:
        """Set missing gradients to zeros. All other gradients were summed over ranks in the backwards."""
        for piece in self._pieces.values():
            if piece.part.grad is None:
                piece.part.grad = torch.zeros_like(piece.part, dtype=self._gradients)

    def gradients(self) -> Sequence[torch.Tensor]:
        return [piece.part.grad for piece in self._pieces.values() if piece.part.grad is not None]

    def _after_step(self) -> None:
        self._summed = torch.empty(0)
        for piece in self._pieces.values():
            piece.part.grad = None

    def discard(self) -> None:
        self._after_step()
        for parameter in self._whole:
            parameter.grad = None
        for model in self._entered:
            model.reset_iter_state()  # FSDP may believe that the failed forward or backward still runs.

    def owned(self) -> Sequence[Owned]:
        return list(self._pieces.values())

    @telling("saving")
    def state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        whole = {one.name: torch.empty(one.shape, dtype=one.local.dtype) for one in self.cuts if keep}
        for rows in gathered(cuts_of(self.model), self.device):
            if keep:
                whole[rows.name][rows.first : rows.first + len(rows.values)].copy_(rows.values)
        return completed(whole, self.model) if keep else {}

    def load_weights(self, folder: Path) -> bool:
        files, names = WeightFiles(folder), all_names(self.model)
        for one in cuts_of(self.model):
            files.copy(names[id(self.model.get_parameter(one.name))], one.local, one.shape, one.rows_of(rank()))
        return True

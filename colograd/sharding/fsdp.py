"""FSDP2 (`fully_shard`): the policy itself is cut too. Its weights come together block by block, in each pass over it.

As in the other strategies gradients add up in their own precision, and the optimizer updates this rank's rows, plain
tensors in the memory that torch gathers from. As ranks exchange inside a forward, one that fails takes part in what the
others still wait for, and then all fail alike.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ..config import GRPOConfig
from ..parallel.faults import telling
from ..parallel.ranks import on_all_ranks
from .blocks import Blocks, Exchange, cut, whole_parameters
from .parts import SharedParts
from .rows import Cut, cuts_of, gathered
from .strategy import Owned, drop_graph
from .weight_files import WeightFiles, all_names, completed

FORWARD, BACKWARD = "forward", "backward"


class FullySharded(SharedParts):
    """Weights, gradients and optimizer state are shared out by rows of each parameter.

    Args:
        model: whole, on any device; it is cut in place, one block after the other.
        device: where it computes; default: where it is.
        reshard, offload: see `blocks.cut`. On a CPU nothing is offloaded.

    Raises:
        ValueError: a model that can't be cut by rows.
    """

    meets_in_backward = True

    def __init__(
        self, model: torch.nn.Module, device: torch.device | None = None, reshard: bool = True, offload: bool = False
    ) -> None:
        super().__init__(model)
        self._device = device or next(model.parameters()).device
        self._reshard, self._offload = reshard, offload and self._device.type != "cpu"
        self._gradients = gradient_dtype(model)
        self._passed: list[Exchange] = []  # in the present pass
        self._usual: dict[tuple[torch.nn.Module, str], Sequence[Exchange]] = {}  # of a whole pass
        self._entered: dict[Any, None] = {}  # models that a pass has been in
        self._began = False  # whether a pass has begun in the present `agree`
        self._summed, self._taken = torch.empty(0), 0  # the present block's gradients, and how many were taken
        self.blocks = self._cut(model, self._reshard)
        self._whole = [p for block in self.blocks.all() for p in whole_parameters(block) if p.requires_grad]
        for parameter in self._whole:
            if hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = self._gradients  # a tied embedding has two gradients in one backward
        self.cuts = cuts_of(model)
        self._pieces: dict[str, Owned] = {}
        for one in self.cuts:
            self._own(one, model.get_parameter(one.name))
        self._sizes = self._sizes_of_sums()
        self._usual[model, BACKWARD] = list(self.blocks.backward(self._sizes, self._reshard))
        self.traffic.take()  # what it took to get here is no step's

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

    @property
    def device(self) -> torch.device:
        return self._device

    # -- the cut

    def _cut(self, model: Any, reshard: bool) -> Blocks:
        blocks = cut(model, self._device, self, self._gradients, reshard, self._offload)
        self._usual[model, FORWARD] = [Exchange(block) for block in blocks.all()]
        model.around_forward = functools.partial(self._forward, blocks)
        model.tower_in_each_forward = bool(blocks.tower)
        return blocks

    def share_frozen(self, model: torch.nn.Module) -> None:
        self._cut(model, reshard=True)

    def close(self) -> None:
        for model, kind in self._usual:
            if kind == FORWARD:
                del model.around_forward, model.tower_in_each_forward

    def _own(self, one: Cut, parameter: torch.nn.Parameter) -> None:
        """Let the optimizer see this rank's rows, and take their gradients from what torch has summed."""
        if not parameter.requires_grad:
            return
        if one.local.numel():
            part = torch.nn.Parameter(one.local.view(-1))
            if part.dtype != self._gradients:
                part.grad_dtype = self._gradients
            self._pieces[one.name] = Owned(one.name, part, one.start, one.start + part.numel())
        parameter.register_post_accumulate_grad_hook(self._taker(one))

    def _taker(self, one: Cut) -> Callable[[torch.Tensor], None]:
        padded = one.share * one.row

        def take(parameter: torch.Tensor) -> None:
            parameter.grad = None  # rounded to the parameter's dtype
            first, self._taken = self._taken, self._taken + padded
            piece = self._pieces.get(one.name)
            if piece is not None:
                gradient = self._summed[first : first + piece.part.numel()].to(piece.part.device)
                piece.part.grad = gradient if piece.part.grad is None else piece.part.grad.add_(gradient)

        return take

    def on_gather(self, block: FSDPModule, whole: torch.Tensor) -> None:
        self._passed.append(Exchange(block))
        self.traffic.gathered += whole.nbytes

    def on_reduce(self, block: FSDPModule, whole: torch.Tensor) -> None:
        if whole.numel() != self._sizes[block]:
            raise RuntimeError(
                f"The gradients of a {type(block).__name__.removeprefix('FSDP')} have {whole.numel():,} elements and "
                f"not {self._sizes[block]:,}: a parameter had no part in the loss. Freeze those that never have "
                "(requires_grad_(False)), or set sharding: gradients."
            )
        self._passed.append(Exchange(block, whole.numel()))
        self.traffic.reduced += whole.nbytes

    def take(self, own: torch.Tensor) -> None:
        self._summed, self._taken = own, 0

    # -- a pass

    @contextmanager
    def agree(self, what: str) -> Iterator[None]:
        self._began = False
        with on_all_ranks(what):
            try:
                yield
            except Exception as error:
                if not self._began:
                    self._decline(error)
                raise

    def _decline(self, error: Exception) -> None:
        """This rank can't begin the forward in which the others are, or will be: they learn it at its end."""
        with contextlib.suppress(Exception), self._forward(self.blocks):
            raise error

    @contextmanager
    def _forward(self, blocks: Blocks) -> Iterator[None]:
        """Around each call of a model that is cut: it fails on all ranks or on none."""
        self._began = True
        with on_all_ranks("the forward"), self._answering(blocks.root, FORWARD):
            yield
        if not torch.is_grad_enabled():  # no backward comes to forget what the next step will have changed
            for block in blocks.all():
                block.reshard()

    def backward(self, loss: torch.Tensor) -> None:
        """A collective. Should it fail on this rank, the others' exchanges are still answered."""
        self._began = True
        with self._answering(self.model, BACKWARD):
            try:
                loss.backward()
            except Exception as error:
                drop_graph(loss, error)
                raise

    @contextmanager
    def _answering(self, model: torch.nn.Module, kind: str) -> Iterator[None]:
        self._passed.clear()
        try:
            yield
        except Exception as error:
            if self._passed:
                self._entered[model] = None
            traceback.clear_frames(error.__traceback__)  # which hold the activations: room for what is to be answered
            for exchange in self._usual[model, kind][len(self._passed) :]:
                exchange.answer(self._device, self._gradients)
            raise
        self._usual[model, kind] = tuple(self._passed)
        self._entered[model] = None

    def _sizes_of_sums(self) -> dict[Any, int]:
        """Elements of each block's gradients, every parameter's padded to equal shares."""
        # The model itself comes first: parameters of the other blocks are theirs.
        owner = {id(p): block for block in self.blocks.all() for p in block.parameters()}
        sizes = dict.fromkeys(self.blocks.all(), 0)
        for one in self.cuts:
            parameter = self.model.get_parameter(one.name)
            if parameter.requires_grad:
                sizes[owner[id(parameter)]] += one.share * one.row * self.parts
        return sizes

    # -- a step

    def sum_gradients(self) -> None:
        """All of it was done in the backwards; after a step without any there are zeros."""
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
            model.reset_iter_state()  # as if the pass that failed hadn't begun

    def owned(self) -> Sequence[Owned]:
        return list(self._pieces.values())

    def gather_weights(self) -> None:
        """Each pass does."""

    # -- files

    @telling("saving")
    def state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        whole = {one.name: torch.empty(one.shape, dtype=one.local.dtype) for one in self.cuts if keep}
        for rows in gathered(cuts_of(self.model), self._device):
            if keep:
                whole[rows.name][rows.first : rows.first + len(rows.values)].copy_(rows.values)
        return completed(whole, self.model) if keep else {}

    def load_weights(self, folder: Path) -> bool:
        files, names = WeightFiles(folder), all_names(self.model)
        for one in cuts_of(self.model):
            files.read(names[id(self.model.get_parameter(one.name))], one)
        return True


def gradient_dtype(model: torch.nn.Module) -> torch.dtype:
    """In which gradients add up: the widest that a trained parameter asks for."""
    asked = {getattr(p, "grad_dtype", None) or p.dtype for p in model.parameters() if p.requires_grad}
    return max(asked, key=lambda dtype: dtype.itemsize)

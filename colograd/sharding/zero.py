"""Strategies that don't divide the weights: ZeRO (arXiv 1910.02054), and `WholeCopies`, which divides nothing.

With ZeRO on N ranks, a rank's optimizer updates one N-th of every bucket of parameters, in place. An all-gather then
copies the updated elements to all ranks. An engine that shares the policy's memory needs no further copy."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.optim import Optimizer

from ..config import GRPOConfig
from ..parallel import watchdog
from ..parallel.faults import telling
from ..parallel.ranks import rank, world_size
from ..parallel.shards import RankGroup, all_gather, gradient_dtype, in_buckets, sum_over_ranks, zero_gradients
from ..policy.lora import unwrap
from ..runtime import registry
from ..runtime.failures import forget_frames
from ..runtime.importing import find_object, is_import_path
from . import optimizer_state
from .strategy import Owned, ShardingStrategy, Write

IN_FLIGHT = 2  # Maximum number of reduce-scatters at once, because each needs memory.
# Maximum elements of a bucket of several parameters: 64 MiB of float32, enough to use a link fully.
ELEMENTS = 2**24
PATIENCE = 30.0  # Seconds to wait for the other ranks of a row to run out of memory, too.

# torch 2.13 renames `reduce_scatter_tensor` to `reduce_scatter_single`
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Bucket:
    """Parameters that ranks exchange as one flat tensor. Zeros pad the tensor so that all ranks have equal parts."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter], rank: int, ranks: int, group: Any = None
    ) -> None:
        self.parameters, self.ranks, self.group = parameters, ranks, group
        self.gradient_dtype = gradient_dtype(parameters[0])
        self.sizes = [parameter.numel() for parameter in parameters]
        self.starts = list(itertools.accumulate(self.sizes, initial=0))[:-1]
        self.part = -(-sum(self.sizes) // ranks)  # Elements per rank, with padding.
        self.begin = rank * self.part
        # Whether the only parameter's own memory serves as the flat tensor, without a copy.
        self.in_place = len(parameters) == 1 and self.sizes[0] == self.part * ranks
        self.sum: torch.Tensor | None = None
        self.places: dict[Owned, slice] = {}
        for name, parameter, start in zip(names, parameters, self.starts, strict=True):
            first = min(max(self.begin - start, 0), parameter.numel())
            last = min(max(self.begin + self.part - start, 0), parameter.numel())
            if first < last:
                piece = torch.nn.Parameter(parameter.data.view(-1)[first:last])
                if self.gradient_dtype != piece.dtype:
                    piece.grad_dtype = self.gradient_dtype
                begin = start + first - self.begin
                self.places[Owned(name, piece, first, last)] = slice(begin, begin + last - first)

    def flat(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Concatenate a tensor per parameter (None: zeros) into a tensor ``[part * ranks]``. Zeros pad its end."""
        if self.in_place and tensors[0] is not None and tensors[0].is_contiguous():
            return tensors[0].view(-1).to(self.parameters[0].device)
        flat = torch.zeros(self.part * self.ranks, dtype=dtype, device=self.parameters[0].device)
        for tensor, start, size in zip(tensors, self.starts, self.sizes, strict=True):
            if tensor is not None:
                flat[start : start + size].copy_(tensor.reshape(-1))
        return flat

    def add(self, summed: torch.Tensor) -> None:
        self.sum = summed if self.sum is None else self.sum.add_(summed)
        for piece, place in self.places.items():
            piece.part.grad = self.sum[place]

    def discard(self) -> None:
        self.sum = None
        for piece in self.places:
            piece.part.grad = None

    @torch.no_grad()
    def gather(self) -> int:
        """Write all ranks' updated weights into the parameters. Return the number of gathered bytes."""
        flat = self.flat([parameter.data for parameter in self.parameters], self.parameters[0].dtype)
        all_gather(flat, flat[self.begin : self.begin + self.part], group=self.group)
        watchdog.progress()
        if not self.in_place:
            for parameter, start, size in zip(self.parameters, self.starts, self.sizes, strict=True):
                parameter.data.copy_(flat[start : start + size].view_as(parameter))
        return flat.nbytes


def buckets_of(
    model: torch.nn.Module, rank: int, ranks: int, elements: int = ELEMENTS, group: Any = None
) -> list[Bucket]:
    """Divide trained parameters into buckets, each of one dtype. The last parameters come first, as in a backward."""
    trained = [(name, p) for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    buckets = []
    for _, same_kind in itertools.groupby(trained, key=lambda item: (item[1].dtype, item[1].device)):
        for members in in_buckets(same_kind, elements, lambda item: item[1].numel()):
            names, parameters = zip(*members, strict=True)
            buckets.append(Bucket(names, parameters, rank, ranks, group))
    return buckets


class WholeCopies(ShardingStrategy):
    def sum_gradients(self) -> None:
        parameters, size = list(self.model.parameters()), world_size() if self.among is None else self.among.size
        if size > 1 or all(parameter.grad is None for parameter in parameters):
            zero_gradients(parameters)
        if size > 1:
            self.traffic.reduced += sum_over_ranks(self.gradients(), among=self.among)

    def gradients(self) -> Sequence[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def owned(self) -> Sequence[Owned]:
        trained = self.model.named_parameters()
        return [Owned(name, p, 0, p.numel()) for name, p in trained if p.requires_grad]

    def cuts_optimizer(self, optimizer: Optimizer, owned: Sequence[Owned]) -> bool:
        return optimizer_state.can_be_cut(optimizer, owned)

    def save_optimizer(self, optimizer: Optimizer, folder: Path, keep: bool = True, write: Write = save_file) -> bool:
        can_be_cut = self.cuts_optimizer(optimizer, self.owned())
        if keep and can_be_cut:
            optimizer_state.save(optimizer, self.owned(), folder, 0, 1, write)
        return can_be_cut

    def load_optimizer(self, optimizer: Optimizer, folder: Path) -> bool:
        if is_sharded := any(folder.glob(optimizer_state.PATTERN)):
            optimizer_state.load(optimizer, self.owned(), folder)
        return is_sharded


class SharedParts(ShardingStrategy):
    """Base class of strategies that divide the summed gradient and optimizer state over a group of ranks (`among`)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.parts = world_size() if self.among is None else self.among.size
        self._order: list[str] = []  # names of trained parameters, in the order of an optimizer without sharding

    @abstractmethod
    def _after_step(self) -> None:
        """Drop the gradients after an optimizer step. Gather this rank's weights that were updated on other ranks."""

    def share(self, optimizer: Optimizer) -> None:
        pieces = {piece.name: piece.part for piece in self.owned()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in optimizer.param_groups:
            named = [names[id(parameter)] for parameter in group["params"]]
            self._order += named
            group["params"] = [pieces[name] for name in named if name in pieces]
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def save_optimizer(self, optimizer: Optimizer, folder: Path, keep: bool = True, write: Write = save_file) -> bool:
        optimizer_state.save(optimizer, self.owned(), folder, rank(), world_size(), write)
        return True

    def load_optimizer(self, optimizer: Optimizer, folder: Path) -> bool:
        optimizer_state.load(optimizer, self.owned(), folder, self._order, rank(), world_size())
        return True


class SharedOptimizer(SharedParts):
    """ZeRO stage 1: ranks divide the optimizer's state. Whole gradients are summed over ranks once per step."""

    shared_out, exchanged = "optimizer state", "once per step"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        among = self.among
        place, group = (rank(), None) if among is None else (among.place, among.group)
        self.buckets: list[Bucket] = buckets_of(model, place, self.parts, group=group)
        # Running reduce-scatters: bucket, input, output [part], and the collective's handle.
        self._under_way: collections.deque[tuple[Bucket, torch.Tensor, torch.Tensor, dist.Work]] = collections.deque()

    def describe(self) -> str:
        elements = sum(sum(bucket.sizes) for bucket in self.buckets)
        return (
            f"sharding: {self.shared_out} of {elements / 1e6:,.1f} M trained parameters in {self.parts} parts, one per "
            f"rank; {len(self.buckets)} buckets, exchanged {self.exchanged}"
        )

    def _after_step(self) -> None:
        self.gather_weights()
        self.discard()

    def sum_gradients(self) -> None:
        for bucket in self.buckets:
            self._reduce(bucket)
        self._finish()

    def _reduce(self, bucket: Bucket) -> None:
        self._finish(but=IN_FLIGHT - 1)
        flat = bucket.flat(self._whole(bucket), bucket.gradient_dtype)
        summed = torch.empty(bucket.part, dtype=flat.dtype, device=flat.device)
        work = reduce_scatter(summed, flat, async_op=True, group=bucket.group)
        self._under_way.append((bucket, flat, summed, work))

    def _whole(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        gradients = [parameter.grad for parameter in bucket.parameters]
        for parameter in bucket.parameters:
            parameter.grad = None
        return gradients

    def _keep(self, bucket: Bucket, summed: torch.Tensor) -> None:
        bucket.add(summed)

    def _has(self, bucket: Bucket) -> bool:
        return bucket.sum is not None

    def _finish(self, but: int = 0) -> None:
        while len(self._under_way) > but:
            bucket, flat, summed, work = self._under_way.popleft()
            watchdog.finish(work)
            self._keep(bucket, summed)
            self.traffic.reduced += flat.nbytes

    def gradients(self) -> Sequence[torch.Tensor]:
        return [bucket.sum for bucket in self.buckets if bucket.sum is not None]

    def discard(self) -> None:
        for bucket in self.buckets:
            bucket.discard()

    def owned(self) -> Sequence[Owned]:
        return [piece for bucket in self.buckets for piece in bucket.places]

    def gather_weights(self) -> None:
        for bucket in self.buckets:
            self.traffic.gathered += bucket.gather()


class SharedGradients(SharedOptimizer):
    """ZeRO stage 2: ranks divide gradients and optimizer state. Gradients are summed over ranks in each backward."""

    meets_in_backward, shared_out, exchanged = True, "optimizer state and gradients", "in each backward"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._next = len(self.buckets)  # Index of the next bucket to sum. Outside of a backward, the number of buckets.
        self._amid = True
        self._missing: list[int] = []  # Per bucket, the number of gradients that this backward hasn't computed yet.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._on_gradient(index))
            for index, bucket in enumerate(self.buckets)
            for parameter in bucket.parameters
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward, and sum its gradients over ranks bucket by bucket.

        If the backward fails, this rank adds zeros to the remaining collectives, because other ranks wait in them."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._next, self._amid = 0, self._goes_alike(loss)
        try:
            super().backward(loss)
        except BaseException:
            self.model.zero_grad(set_to_none=True)  # free gradients, because the remaining collectives need memory
            raise
        finally:
            self._reduce_complete(all_buckets=True)
            self._finish()

    def _goes_alike(self, loss: torch.Tensor) -> bool:
        """Return whether `backward` may sum buckets before its end. Always True in this class.

        A subclass returns False if ranks might run collectives in different orders, which would be a deadlock."""
        return True

    def _on_gradient(self, index: int) -> None:
        if not self._amid or self._next == len(self.buckets):
            return
        self._missing[index] -= 1
        self._reduce_complete()

    def _reduce_complete(self, all_buckets: bool = False) -> None:
        while self._next < len(self.buckets) and (all_buckets or not self._missing[self._next]):
            self._reduce(self.buckets[self._next])
            self._next += 1

    def sum_gradients(self) -> None:
        """Set the gradient sums to zeros if the step had no backward. Otherwise `backward` has set them."""
        for bucket in self.buckets:
            if not self._has(bucket):
                zeros = torch.zeros(bucket.part, dtype=bucket.gradient_dtype, device=bucket.parameters[0].device)
                self._keep(bucket, zeros)


@contextlib.contextmanager
def telling_unless_alike(what: str, row: RankGroup) -> Iterator[None]:
    """Report an error in the `with` block to the other ranks, unless all ranks of the group ``row`` ran out of memory.

    The group's ranks train a row together and do equal work. If all of them run out of memory at the same operation,
    no rank waits for another, and the step can be repeated."""
    shortage: torch.OutOfMemoryError | None = None
    with telling(what):
        try:
            yield
        except torch.OutOfMemoryError as error:
            forget_frames(error)
            if not row.meets(PATIENCE):
                raise
            shortage = error
    if shortage is not None:
        raise shortage


class SharedRows(ShardingStrategy):
    """Mixin for strategies where several ranks train each row together. A second base class sums the gradients."""

    meets_in_backward = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._around(model)

    @property
    @abstractmethod
    def row(self) -> RankGroup:
        """The ranks that train a row together."""

    def share_frozen(self, model: torch.nn.Module) -> None:
        self._around(model)

    def _around(self, model: torch.nn.Module) -> None:
        # Set `around_forward` on the model inside a PEFT wrapper: the check of rows at start runs only this model.
        unwrap(model).around_forward = functools.partial(telling_unless_alike, "the forward", self.row)

    def close(self) -> None:
        super().close()
        del unwrap(self.model).around_forward

    def failed(self, error: BaseException) -> None:
        with contextlib.suppress(BaseException), telling_unless_alike("the backward", self.row):
            raise error


STRATEGIES: dict[str, type[ShardingStrategy]]
STRATEGIES = {"none": WholeCopies, "optimizer": SharedOptimizer, "gradients": SharedGradients}


def strategy_name(config: GRPOConfig) -> str:
    return config.sharding if config.world_size > 1 or is_import_path(config.sharding) else "none"


def strategy_of(config: GRPOConfig) -> type[ShardingStrategy]:
    name = strategy_name(config)
    if is_import_path(name):
        return find_strategy(name)
    way = STRATEGIES.get(name) or registry.hooks(f"sharding:{name}")[0]
    for variant in registry.hooks("sharding_variant"):
        way = variant(way, config)
    return way


def find_strategy(path: str) -> type[ShardingStrategy]:
    way = find_object(path, "sharding", lambda value: isinstance(value, type))
    if not (isinstance(way, type) and issubclass(way, ShardingStrategy)):
        raise ValueError(
            f"`sharding` is {path!r}, which isn't a class derived from colograd.sharding.ShardingStrategy: derive it "
            "from ShardingStrategy, or from colograd.sharding.zero.WholeCopies to override only some methods."
        )
    if missing := sorted(way.__abstractmethods__):
        raise ValueError(
            f"`sharding` is {path!r}, a class without the method `{missing[0]}`: define it, see "
            "colograd/sharding/strategy.py."
        )
    return way


def check_sharding(config: GRPOConfig, optimizer: Any) -> None:
    replaces = config.sharding != "none"
    if is_import_path(config.sharding):
        replaces = find_strategy(config.sharding).share is not ShardingStrategy.share
    if optimizer is not None and replaces:
        raise ValueError(
            f"`sharding` is {config.sharding!r}, which can't use the optimizer passed to the trainer "
            f"({type(optimizer).__name__}): each rank's optimizer has slices of parameters. Remove the argument "
            "`optimizers` and set `optim`, or set `sharding: none`."
        )

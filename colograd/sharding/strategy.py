"""`ShardingStrategy`: the interface of strategies that divide a policy's training over ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.optim import Optimizer

from ..config import GRPOConfig
from ..parallel.ranks import on_all_ranks
from ..parallel.shards import RankGroup, Shard
from ..runtime.failures import forget_frames

# A function that writes a safetensors file, at once or later, from tensors on any device, a path, and metadata.
Write = Callable[[dict[str, torch.Tensor], str | Path, dict[str, str]], Any]


@dataclass(frozen=True, slots=True)
class Owned:
    """A range of a parameter's elements that this rank's optimizer updates, and the tensor that has these elements."""

    name: str
    part: torch.Tensor  # Tensor in the optimizer's groups, in memory of the policy.
    start: int  # Index of the first element in the flattened parameter, or in its flattened part ``shard``.
    stop: int  # Index of the last element, plus 1.
    shard: Shard | None = None  # This rank's tensor-parallel part. None: ``start`` counts in the parameter.

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of ``whole``, a tensor of the parameter's shape. The result has the shape of
        ``part``."""
        whole = whole if self.shard is None else self.shard.of(whole)
        return whole.reshape(-1)[self.start : self.stop].view(self.part.shape)


@dataclass(slots=True)
class Traffic:
    """Bytes that were reduced, gathered and published since the last `take`, for metrics ``sync/..._bytes``."""

    reduced: int = 0
    gathered: int = 0
    published: int = 0

    def take(self) -> dict[str, float]:
        metrics = {f"sync/{name}_bytes": float(number) for name, number in asdict(self).items()}
        self.reduced = self.gathered = self.published = 0
        return metrics


@dataclass
class ShardingStrategy(ABC):
    """A strategy that divides a policy's training over ranks.

    Create the strategy after the policy's weights are in their final memory, and before the optimizer. An optimizer
    step calls `backward` for each micro-batch, then `sum_gradients`, `divide_gradients`, `clip`, and the optimizer's
    `step`. Afterwards every rank has all new weights, or its part if the strategy divides the weights."""

    model: torch.nn.Module
    traffic: Traffic = field(default_factory=Traffic)

    # Whether ranks communicate in backwards. All ranks must then run equally many backwards.
    meets_in_backward: ClassVar[bool] = False
    parts: int = 1  # Number of parts that the optimizer's state is divided into.

    @property
    def among(self) -> RankGroup | None:
        """The group of ranks that sum gradients, and may divide the optimizer's state. None means all ranks."""
        return None

    @classmethod
    def for_run(cls, model: torch.nn.Module, config: GRPOConfig) -> ShardingStrategy:
        """Create the strategy for ``model`` with the settings of ``config``."""
        return cls(model)

    def share_frozen(self, model: torch.nn.Module) -> None:  # noqa: B027 (most strategies keep a frozen model whole)
        """Set up a frozen reference or teacher model like the policy. FSDP divides the frozen weights over ranks."""

    def describe(self) -> str:
        """Return one line for the log at start, or "" if nothing is divided."""
        return ""

    def share(self, optimizer: Optimizer) -> None:  # noqa: B027 (the optimizer may update all parameters)
        """Replace the parameters in the optimizer's groups by the parts that this rank updates. If this rank also has
        weights that other ranks update, register a hook that calls `gather_weights` after each step."""

    def agree(self, what: str) -> AbstractContextManager[None]:
        """Return a context that raises one rank's error on all ranks (`on_all_ranks(what)`) if `meets_in_backward`."""
        return on_all_ranks(what) if self.meets_in_backward else contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch. Some strategies also sum its gradients over ranks."""
        try:
            loss.backward()
        except BaseException as error:
            if self.meets_in_backward:  # Free activations: the collectives that other ranks wait in need memory.
                loss.detach_()  # frees the loss's graph, although callers still refer to the loss
                forget_frames(error)
                if loss.is_cuda:
                    torch.cuda.empty_cache()  # a failed allocation fragments torch's cached memory
                self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:  # noqa: B027 (most strategies have no waiting ranks)
        """Report an error in this rank's backward to ranks that may wait in the backward's collectives."""

    @abstractmethod
    def sum_gradients(self) -> None:
        """Sum over ranks the gradients that `backward` hasn't summed. Missing gradients count as zeros."""

    @abstractmethod
    def gradients(self) -> Sequence[torch.Tensor]:
        """Return this rank's parts of the summed gradient, after `sum_gradients`. Padding elements are 0."""

    @torch.no_grad()
    def divide_gradients(self, denominator: float) -> None:
        """Divide the summed gradient. The denominator may be unknown when the first backward runs."""
        if gradients := list(self.gradients()):
            torch._foreach_div_(gradients, denominator)

    def clip(self, largest: float) -> float:
        """Scale the gradient so that its norm over all ranks is at most ``largest``. Return the norm before scaling."""
        gradients, norm = self.gradients(), self.sum_of_squares() ** 0.5
        factor = largest / (norm + 1e-6)  # 1e-6 as in `torch.nn.utils.clip_grad_norm_`
        if gradients and factor < 1.0:
            torch._foreach_mul_(gradients, factor)
        return norm

    def sum_of_squares(self) -> float:
        local = squared_norm(self.gradients())
        return self.sum_over_parts(local) if self.parts > 1 else local

    @property
    def device(self) -> torch.device:
        """The device of the tensors that ranks exchange."""
        return next(self.model.parameters()).device

    def sum_over_parts(self, number: float) -> float:
        total = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def discard(self) -> None:  # noqa: B027 (the caller sets gradients of parameters to None)
        """Drop the gradients of an optimizer step that failed and will be repeated."""

    @abstractmethod
    def owned(self) -> Sequence[Owned]:
        """Return the parts of trained parameters that this rank's optimizer updates."""

    def gather_weights(self) -> None:  # noqa: B027 (each rank may have updated all weights)
        """Copy the weights that each rank has updated to all other ranks. Needed only if a rank has weights that other
        ranks update."""

    def cuts_optimizer(self, optimizer: Optimizer, owned: Sequence[Owned]) -> bool:
        """Return whether `save_optimizer` can write this optimizer's state. ``owned`` is the result of `owned()`."""
        return True

    @abstractmethod
    def save_optimizer(self, optimizer: Optimizer, folder: Path, keep: bool = True, write: Write = save_file) -> bool:
        """Write this rank's part of the optimizer state. If all ranks have the same state, only ranks with ``keep``
        write. If all engines have the same state, only the engines of such ranks write. If `cuts_optimizer` returns
        False, return False and write nothing."""

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, folder: Path) -> bool:
        """Read the state that any number of ranks wrote. Return False if the caller must load ``optimizer.pt``."""

    def close(self) -> None:  # noqa: B027 (most strategies have nothing to undo)
        """Undo the strategy's changes of the model, so that another trainer can train the model."""

    def state_dict(self, keep: bool) -> dict[str, torch.Tensor] | None:
        """Return the whole state dict of the model (or adapter) in host memory, or {} without ``keep``. All ranks must
        call this. Return None if the model isn't divided: then the model's own `state_dict` is complete."""
        return None

    def load_weights(self, folder: Path) -> bool:
        """Read this rank's part of a saved model's weights. Return False, and read nothing, for an undivided model."""
        return False


@torch.no_grad()
def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the sum of squares, in float64 so that it hardly depends on how ranks divide the gradients."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0

"""`ShardingStrategy`: how ranks share a policy's training, as the trainer sees it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from ..config import GRPOConfig
from ..parallel.shards import RankGroup, Shard
from ..runtime.failures import forget_frames

# (tensors on any device, file, metadata): writes a safetensors file, now or later.
WriteTensors = Callable[[dict[str, torch.Tensor], str | Path, dict[str, str]], Any]


@dataclass(frozen=True, slots=True)
class Owned:
    """Elements of a parameter that this rank has the optimizer state of, with a view that the optimizer updates."""

    name: str
    part: torch.Tensor  # the view
    start: int  # first element in the flattened parameter, or in the flattened shard if there is one
    stop: int  # last element + 1
    shard: Shard | None = None  # this rank's part of the parameter, if that isn't a range of elements

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same elements of a tensor of the parameter's shape, in the shape of the part."""
        whole = whole if self.shard is None else self.shard.of(whole)
        return whole.reshape(-1)[self.start : self.stop].view(self.part.shape)


@dataclass(slots=True)
class Traffic:
    """Bytes moved between ranks, and into the engine, since the last `take`."""

    reduced: int = 0  # gradients
    gathered: int = 0  # weights, after the optimizer's step
    published: int = 0  # further copies into the engine's tensors

    def take(self) -> dict[str, float]:
        """Return the counts as metrics and reset them."""
        metrics = {f"sync/{name}_bytes": float(number) for name, number in asdict(self).items()}
        self.reduced = self.gathered = self.published = 0
        return metrics


@dataclass
class ShardingStrategy(ABC):
    """The division of a policy's training among ranks.

    Create it when the policy is in its final memory, and before its optimizer. A step is `backward` for each
    micro-batch, `sum_gradients`, `divide_gradients`, `clip`, and the optimizer's step. Every rank then has the new
    weights.
    """

    model: torch.nn.Module
    traffic: Traffic = field(default_factory=Traffic)

    name: ClassVar[str]  # the value of `sharding`
    meets_in_backward: ClassVar[bool] = False  # ranks exchange in each backward, so all need the same number
    parts: int = 1  # number of parts of the optimizer's state

    @property
    def among(self) -> RankGroup | None:
        """The ranks that sum gradients and divide the optimizer's state; None: all ranks."""
        return None

    @classmethod
    def for_run(cls, model: torch.nn.Module, config: GRPOConfig) -> ShardingStrategy:
        """Create the strategy with the run's settings."""
        return cls(model)

    def share_frozen(self, model: torch.nn.Module) -> None:  # noqa: B027 (most strategies keep a frozen model whole)
        """Cut a second, frozen model (the reference) in the way of the policy's weights."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the start of a run, or an empty text."""

    @abstractmethod
    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce a new optimizer's groups to this rank's parts, and add a gather of the other parts to its step."""

    def agree(self, what: str) -> AbstractContextManager[None]:
        """Return a context that fails on all ranks or on none (see `on_all_ranks`), if ranks meet in the backward."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of one micro-batch and add up gradients; if ranks meet in it, only of this rank's parts."""
        loss.backward()

    def failed(self, error: BaseException) -> None:  # noqa: B027 (most strategies have no waiting ranks)
        """Handle a failure of this rank before its backward took part in exchanges that other ranks wait for."""

    @abstractmethod
    def sum_gradients(self) -> None:
        """Sum the remaining gradients over ranks, after a step's last backward. A missing gradient counts as zeros."""

    @abstractmethod
    def gradients(self) -> Sequence[torch.Tensor]:
        """Return this rank's share of the summed gradient, after `sum_gradients`. Padding is 0."""

    @torch.no_grad()
    def divide_gradients(self, denominator: float) -> None:
        """Divide the step's summed gradient. The denominator comes last, as backwards may begin before it is known."""
        if gradients := list(self.gradients()):
            torch._foreach_div_(gradients, denominator)

    @abstractmethod
    def clip(self, largest: float) -> float:
        """Scale the gradient down so that its norm over all ranks is at most ``largest``. Return the norm before."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the gradients of a step that will be repeated."""

    @abstractmethod
    def owned(self) -> Sequence[Owned]:
        """Return the parts of trained parameters that this rank has the optimizer state of."""

    @abstractmethod
    def gather_weights(self) -> None:
        """Copy each rank's updated parts of the weights to all ranks."""

    def cuts_optimizer(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
        """Return whether `save_optimizer` can write this optimizer's state."""
        return True

    @abstractmethod
    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: WriteTensors = save_file
    ) -> bool:
        """Write this rank's part of the optimizer state, with ``keep`` also the state that is the same on all ranks.
        Return False if the state can't be cut, and nothing is written."""

    @abstractmethod
    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        """Read optimizer state of any number of ranks. Return False if only the usual file exists; load it as usual."""

    def close(self) -> None:  # noqa: B027 (most strategies have nothing to undo)
        """Undo the changes of the model, so that another trainer can use it."""

    def state_dict(self, keep: bool) -> dict[str, torch.Tensor] | None:
        """Return the whole model's state dict in host memory, or an empty one without ``keep``. A collective. None: the
        model isn't cut, so that its own `state_dict` serves."""
        return None

    def load_weights(self, folder: Path) -> bool:
        """Read this rank's part of a saved model's weights. Return False if the model isn't cut; load it as usual."""
        return False


def drop_graph(loss: torch.Tensor, error: BaseException) -> None:
    """Free the activations of a failed backward. Their memory is needed for exchanges that other ranks wait in."""
    loss.detach_()  # callers may still refer to the loss
    forget_frames(error)
    if loss.is_cuda:
        torch.cuda.empty_cache()  # unused memory is fragmented by the allocation that failed


@torch.no_grad()
def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the sum of all squares, in float64. However it is cut into parts, its float32 root is the same."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


@torch.no_grad()
def scale_down(gradients: Sequence[torch.Tensor], norm: float, largest: float) -> None:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does, with a norm that is already known."""
    factor = largest / (norm + 1e-6)
    if gradients and factor < 1.0:
        torch._foreach_mul_(gradients, factor)

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
from ..runtime.process import forget_frames

# (tensors on any device, file, metadata): writes a safetensors file, or sees to it that it will be.
WriteTensors = Callable[[dict[str, torch.Tensor], str | Path, dict[str, str]], Any]


@dataclass(frozen=True, slots=True)
class Owned:
    """The elements ``start`` ... ``stop`` of a flattened parameter whose optimizer state lies on this rank, as a view
    that the optimizer writes into. Of a parameter whose part on this rank is no range: elements of that part."""

    name: str
    part: torch.Tensor
    start: int
    stop: int
    shard: Shard | None = None  # this rank's part of the parameter, if it is no range of it

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor that has the parameter's shape, in the part's."""
        whole = whole if self.shard is None else self.shard.of(whole)
        return whole.reshape(-1)[self.start : self.stop].view(self.part.shape)


@dataclass(slots=True)
class Traffic:
    """Bytes that were moved between ranks, and into the engine, since they were last taken."""

    reduced: int = 0  # of gradients
    gathered: int = 0  # of weights, after the optimizer
    published: int = 0  # written into the engine's tensors beside that

    def take(self) -> dict[str, float]:
        """As metrics; counting begins anew."""
        taken = {f"sync/{name}_bytes": float(number) for name, number in asdict(self).items()}
        self.reduced = self.gathered = self.published = 0
        return taken


@dataclass
class ShardingStrategy(ABC):
    """How ranks share out a policy's training. Made once the policy lies where it stays, and before its optimizer. A
    step is `backward` for each micro-batch, `sum_gradients`, `divide_gradients`, `clip`, and the optimizer's own, after
    which every rank has the new weights."""

    model: torch.nn.Module
    traffic: Traffic = field(default_factory=Traffic)

    meets_in_backward: ClassVar[bool] = False  # ranks exchange in each backward, so all need equally many
    parts: int = 1  # into which the optimizer's state is cut

    @property
    def among(self) -> RankGroup | None:
        """The ranks that share out what each would hold by itself, and sum gradients; None: all."""
        return None

    @classmethod
    def for_run(cls, model: torch.nn.Module, config: GRPOConfig) -> ShardingStrategy:
        return cls(model)

    def share_frozen(self, model: torch.nn.Module) -> None:  # noqa: B027 (most strategies leave whole what isn't trained)
        """Share out a second model that isn't trained, the reference, as far as the policy's weights are."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the start of a run; empty: there is nothing to say."""

    @abstractmethod
    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave this rank's parts in a fresh optimizer's groups, and have its step bring the other ranks' parts."""

    def agree(self, what: str) -> AbstractContextManager[None]:
        """A context that fails on all ranks or on none (see `on_all_ranks`), if ranks meet in the backward."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """The backward of one micro-batch. Gradients add up; if ranks meet in it, on this rank's parts."""
        loss.backward()

    def failed(self, error: BaseException) -> None:  # noqa: B027 (most strategies have nobody to tell)
        """This rank's backward failed, and hasn't taken part yet in exchanges that other ranks wait for."""

    @abstractmethod
    def sum_gradients(self) -> None:
        """After a step's last backward: what is left to sum over ranks. A missing gradient counts as zeros."""

    @abstractmethod
    def gradients(self) -> Sequence[torch.Tensor]:
        """After `sum_gradients`: this rank's share of the summed gradient; an element that is nobody's is 0."""

    @torch.no_grad()
    def divide_gradients(self, denominator: float) -> None:
        """Divide the step's summed gradient. The denominator comes last, as backwards may begin before it is known."""
        if summed := list(self.gradients()):
            torch._foreach_div_(summed, denominator)

    @abstractmethod
    def clip(self, largest: float) -> float:
        """The norm of the whole gradient over all ranks, which is scaled down to ``largest`` if it is above."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the gradients of a step that is begun anew."""

    @abstractmethod
    def owned(self) -> Sequence[Owned]:
        """The parts of the trained parameters whose optimizer state lies on this rank."""

    @abstractmethod
    def gather_weights(self) -> None:
        """Give every rank the weights that each has written into its own parts."""

    def cuts_optimizer(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
        """Whether `save_optimizer` writes its state."""
        return True

    @abstractmethod
    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: WriteTensors = save_file
    ) -> bool:
        """Write this rank's optimizer state, with ``keep`` also what is the same on all. False: it can't be cut."""

    @abstractmethod
    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        """Read it, however many ranks wrote it. False: there is the usual file alone, and it fits as it is."""

    def close(self) -> None:  # noqa: B027 (most strategies have nothing to undo)
        """Leave the model as it was found: another trainer may take it."""

    def state_dict(self, keep: bool) -> dict[str, torch.Tensor] | None:
        """The model's state dict, whole and in host memory, where ``keep`` asks for it, else empty; None: the model's
        own is. A collective."""
        return None

    def load_weights(self, folder: Path) -> bool:
        """Read a saved model's weights, each rank its own. False: nothing is cut, it is loaded as ever."""
        return False


def drop_graph(loss: torch.Tensor, error: BaseException) -> None:
    """Free the activations that a failed backward still holds: room for the exchanges that are yet to be answered, as
    the other ranks wait in them."""
    loss.detach_()  # whoever else has a name for it
    forget_frames(error)
    if loss.is_cuda:
        torch.cuda.empty_cache()  # what is left lies between the pieces that the failure asked for


@torch.no_grad()
def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """The sum of all squares, in float64: whichever way it is cut into parts, its float32 root is the same."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


@torch.no_grad()
def scale_down(gradients: Sequence[torch.Tensor], norm: float, largest: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_` does it, given the norm."""
    factor = largest / (norm + 1e-6)
    if gradients and factor < 1.0:
        torch._foreach_mul_(gradients, factor)

"""Riders: data of extensions that travels with a rollout or a packed row in addition to its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch

if TYPE_CHECKING:
    from .batch import MicroBatch, ModelInput, PackedRow, Rollout


class Rider:
    """Base class of data that travels with a rollout in addition to its tokens, e.g. the experts that the engine chose.

    An extension derives a frozen dataclass and lists it at the seam ``riders``. `Rollout.get` finds a rollout's rider
    by its class. A record has riders as JSON (KEY, `to_json`, `from_json`) or as a table of Arrow (MARK, `table`,
    `with_table`).
    """

    __slots__ = ()
    KEY: ClassVar[str] = ""  # name of the JSON values
    MARK: ClassVar[bytes] = b""  # first bytes of the table
    COLUMN: ClassVar[str] = ""  # column of ``log_extra``: its values become riders (`from_json`)

    def for_training(self) -> Self:
        """Return the part that another rank needs to train the rollout."""
        return self

    def statistics(self, rollout: Rollout) -> tuple[dict[str, float], dict[str, float]]:
        """Return numbers for a round's metrics: those to sum over rollouts, and those of which the maximum counts."""
        return {}, {}

    @classmethod
    def of_row(cls, row: PackedRow) -> RowRider | None:
        """Return the riders of this class as one object for the row. Called if the row has any."""
        return None

    @classmethod
    def of_turns(cls, parts: Sequence[tuple[Self | None, int]], prompt: int) -> Self | None:
        """Join the riders of a completion that several requests wrote; None: there is nothing to carry.

        Args:
            parts: parts of the completion, each with its number of tokens. A tool's answer has no rider.
            prompt: number of tokens before the first part.
        """
        return None

    @classmethod
    def shared(cls, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Let the rollouts of a group share equal parts of their riders."""
        return rollouts

    def to_json(self) -> Any:
        """Return the rider as JSON, which isn't empty."""
        return None

    @classmethod
    def from_json(cls, value: Any, rollout: Rollout) -> Self:
        """Make the rider from JSON. Raise ValueError or AssertionError if it doesn't fit the rollout."""
        return cls()

    @classmethod
    def table(cls, rollouts: Sequence[Rollout]) -> bytes:
        """Return the riders of a group as bytes that begin with MARK; empty: none are recorded."""
        return b""

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
        """Return the rollouts with the riders of the table that comes next.

        Args:
            encoder: the run's encoder of rows that aren't only text (`data.prompts.RowEncoder`), or None.
        """
        return rollouts


class Media(Rider):
    """Base class of a prompt's content that isn't text. Equal content means equal objects and hashes."""

    __slots__ = ()
    digest: str  # digest of the content, the same in every process

    def followed_by(self, before: ModelInput, ids: Sequence[int], media: Media | None) -> Media:
        """Return the media of `ModelInput.followed_by`. Called on the last of ``before.media`` and ``media``."""
        return self

    def thumbnails(self, *more: Media) -> list[bytes]:
        """Return JPEG thumbnails of the first pictures in this object and in ``more``, for people to look at."""
        return []

    @property
    def sizes(self) -> tuple[str, ...]:
        """The pictures' sizes, for people: 640x480."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return 0

    def shifted(self, tokens: int) -> Self:
        """Return the media with all places ``tokens`` further back."""
        return self


class RowRider:
    """Base class of data that travels with a row in addition to its tokens. `MicroBatch.get` finds it by its class."""

    __slots__ = ()
    OF_POLICY: ClassVar[bool] = False  # whether only the policy reads it, not the models that run on the same rows

    def part(self, tokens: slice, labels: torch.Tensor) -> Self:
        """Return the part that belongs to some of the row's tokens and labels (indices in host memory)."""
        return self

    def applied(self, row: MicroBatch) -> MicroBatch:
        """Return the row as it is trained. Called once, when it is laid out."""
        return row

    def padded(self, tokens: int) -> Self:
        """Return the rider of the row with ``tokens`` more at its end, which belong to no sequence."""
        return self

    def candidates(self, device: torch.device, first: int) -> Any:
        """Return the labels' candidate tokens (`policy.head.Kept`), if the softmax isn't over the whole vocabulary.

        Args:
            first: token id of the head's first row, if ranks share out the vocabulary.
        """
        return None

    def metrics(self, difference: torch.Tensor, scored: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return metrics of a training step, each as sum and count.

        Args:
            difference: (N,) absolute difference of the trainer's and the sampler's log-probabilities.
            scored: (N,) float32, 1: the label counts.
        """
        return {}


T = TypeVar("T")


def first(riders: Sequence[Any], kind: type[T]) -> T | None:
    return next((rider for rider in riders if isinstance(rider, kind)), None)


def joined_riders(parts: Sequence[tuple[Sequence[Rider], int]], prompt: int) -> tuple[Rider, ...]:
    """Join the riders of a completion that several requests wrote; see `Rider.of_turns`."""
    kinds = dict.fromkeys(type(rider) for riders, _ in parts for rider in riders)
    joined = (kind.of_turns([(first(riders, kind), length) for riders, length in parts], prompt) for kind in kinds)
    return tuple(rider for rider in joined if rider is not None)


def with_shared_riders(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """Let the rollouts of a group share equal parts of their riders."""
    for kind in dict.fromkeys(type(rider) for rider in rollouts[0].riders):
        rollouts = kind.shared(rollouts)
    return rollouts


def riding(rollouts: Sequence[Rollout]) -> dict[type[Rider], None]:
    """Return the classes of the rollouts' riders and media, each once."""
    riders = (rider for rollout in rollouts for rider in (rollout.input.media, *rollout.riders))
    return dict.fromkeys(type(rider) for rider in riders if rider is not None)

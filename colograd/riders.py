"""Riders: data of extensions that travels with a rollout or a packed row in addition to the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import torch

if TYPE_CHECKING:
    from .batch import MicroBatch, ModelInput, PackedRow, Rollout


class Segment(NamedTuple):
    """A part of a completion, e.g. a branch. It continues the prompt, the prompt's first tokens, or an earlier part."""

    context: int  # Number of earlier tokens that the part attends to, prompt included.
    length: int  # Number of the part's tokens.
    ends: bool = True  # Whether a sequence ends with this part.


class Rider:
    """Base class of data that an extension adds to a rollout, e.g. the experts that vLLM's router chose per token.

    An extension derives a frozen dataclass from `Rider` and lists the class under ``riders`` in its `HOOKS`."""

    __slots__ = ()
    KEY: ClassVar[str] = ""  # Key of the rider's JSON value (`to_json`) in the rollout log. "": not JSON.
    MARK: ClassVar[bytes] = b""  # First bytes of the rider's Arrow table (`table`) in the rollout log. b"": no table.
    COLUMN: ClassVar[str] = ""  # Name of a log column. A reward function's values in this column become riders.

    def for_training(self) -> Self:
        """Return the rider with only the data that a rank needs to train on the rollout."""
        return self

    def statistics(self, rollout: Rollout) -> tuple[dict[str, float], dict[str, float]]:
        """Return a rollout's metrics in two dicts: values to sum over rollouts, and values to take the maximum of."""
        return {}, {}

    def segments(self) -> tuple[Segment, ...]:
        """Return the parts, in order, into which this rider divides the completion. () means one undivided part. The
        extension's `RowRider.applied` must divide packed rows in the same way."""
        return ()

    @classmethod
    def of_row(cls, row: PackedRow) -> RowRider | None:
        """Return a packed row's `RowRider`, or None. Called if any rollout of the row has a rider of this class."""
        return None

    @classmethod
    def of_turns(cls, parts: Sequence[tuple[Self | None, int]], prompt: int) -> Self | None:
        """Join the riders of a completion's parts, for example of the turns of a conversation.

        Args:
            parts: (rider, number of tokens) per part. The rider is None for a part without one, e.g. a tool's answer.
            prompt: number of tokens before the first part.
        """
        return None

    @classmethod
    def shared(cls, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Return a group's rollouts with riders that share one copy of equal data, to save memory."""
        return rollouts

    def to_json(self) -> Any:
        """Return the rider as a JSON value for the rollout log. A falsy value, such as [] or 0, means no rider."""
        return None

    @classmethod
    def from_json(cls, value: Any, rollout: Rollout) -> Self:
        """Make the rider from its JSON value, or from a reward function's value in `COLUMN`. Raise ValueError for a
        wrong value. A class without `COLUMN` may raise AssertionError instead."""
        return cls()

    @classmethod
    def table(cls, rollouts: Sequence[Rollout]) -> bytes:
        """Return the riders of a group as an Arrow table in bytes that begin with MARK. Empty bytes mean no table."""
        return b""

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
        """Read the next Arrow table of a group's record, and return the rollouts with the table's riders added.

        Args:
            encoder: the run's `PromptRules.reader`, which reads images of dataset rows, or None.
        """
        return rollouts


class Media(Rider):
    """Base class of content that isn't text, e.g. images. Objects of two equal prompts must be equal and hashable."""

    __slots__ = ()
    digest: str  # Digest of the content. Equal content has the same digest in every process.

    def followed_by(self, before: ModelInput, ids: Sequence[int], media: Media | None) -> Media:
        """Return the content of ``before`` + ``ids``. ``media``: content of the appended tokens ``ids``, or None."""
        return self

    def thumbnails(self, *more: Media) -> list[bytes]:
        """Return at most `sizes.THUMBNAILS` JPEG thumbnails of pictures in this object and in the objects ``more``."""
        return []

    @property
    def sizes(self) -> tuple[str, ...]:
        """The pictures' sizes in pixels as texts such as "640x480"."""
        return ()

    @property
    def nbytes(self) -> int:
        return 0

    def shifted(self, tokens: int) -> Self:
        """Return the media with all token positions of the content increased by the number ``tokens``."""
        return self


class WithMedia:
    """Base class of `ModelInput` with the methods that depend on content that isn't text."""

    __slots__ = ()
    ids: tuple[int, ...]
    media: Media | None

    def followed_by(self: Any, ids: Sequence[int], media: Media | None = None) -> Any:
        """Return the input with the tokens ``ids`` and their content ``media`` appended.

        Token positions in ``media`` count from the start of ``ids``."""
        last = media or self.media
        joined = None if last is None else last.followed_by(self, ids, media)
        return dataclasses.replace(self, ids=(*self.ids, *ids), media=joined)

    def for_training(self: Any) -> Any:
        return self if self.media is None else dataclasses.replace(self, media=self.media.for_training())

    @property
    def images(self) -> Any:
        """The former name of `media`, which user code may still read."""
        return self.media

    @property
    def content(self) -> bytes:
        """Digest of the images and other content that isn't text. Plain text has an empty digest."""
        return b"" if self.media is None else self.media.digest.encode()


class RowRider:
    """Base class of data that an extension adds to a packed row, e.g. a weight for each label's advantage."""

    __slots__ = ()
    OF_POLICY: ClassVar[bool] = False  # Whether the rider is only for the policy, not for reference and teacher models.

    def part(self, tokens: slice, labels: torch.Tensor) -> Self:
        """Return the rider for part of the row: tokens in slice ``tokens``, and labels at indices ``labels`` (CPU)."""
        return self

    def applied(self, row: MicroBatch) -> MicroBatch:
        """Return the row with the rider's changes. `policy.packing.collate` calls this once, on the complete row."""
        return row

    def padded(self, tokens: int) -> Self:
        """Return the rider for the row after ``tokens`` padding tokens have been appended."""
        return self

    def metrics(self, difference: torch.Tensor, scored: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return metrics of a micro-batch as name -> (sum, count).

        Args:
            difference: (N,) per label the absolute difference of the old policy's and the sampler's log-probability.
            scored: (N,) float32, 1 for a label that counts in the metrics, else 0.
        """
        return {}


T = TypeVar("T")


def first(riders: Sequence[Any], kind: type[T]) -> T | None:
    return next((rider for rider in riders if isinstance(rider, kind)), None)


def joined_riders(parts: Sequence[tuple[Sequence[Rider], int]], prompt: int) -> tuple[Rider, ...]:
    """Join a completion's riders, class by class, by `Rider.of_turns`. ``parts``: (riders, token count) per part."""
    kinds = dict.fromkeys(type(rider) for riders, _ in parts for rider in riders)
    joined = (kind.of_turns([(first(riders, kind), length) for riders, length in parts], prompt) for kind in kinds)
    return tuple(rider for rider in joined if rider is not None)


def with_shared_riders(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    for kind in dict.fromkeys(type(rider) for rider in rollouts[0].riders):
        rollouts = kind.shared(rollouts)
    return rollouts


def riding(rollouts: Sequence[Rollout]) -> dict[type[Rider], None]:
    """Return the distinct classes of the rollouts' riders and of their prompts' media."""
    riders = (rider for rollout in rollouts for rider in (rollout.input.media, *rollout.riders))
    return dict.fromkeys(type(rider) for rider in riders if rider is not None)

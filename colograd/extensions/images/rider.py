"""Images of prompts, of tools' answers and of environments: how they travel with a rollout and are recorded.

Images of a dataset's rows aren't recorded. The others stand behind a group's table as PNG files, each picture once,
with the places of their tokens. The model's processor computes their pixels again when the group is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from ...batch import ModelInput, Rollout
from ...riders import Media
from ...rollout.group_table import read_table, table_bytes
from ...runtime.sizes import THUMBNAIL_BYTES, THUMBNAILS

STAND_IN = 0  # a token that is no model's image placeholder
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")  # model inputs that mark the tokens of images
ENVIRONMENTS = "environments"  # the rollout's column with its environment
SIDE = 64  # pixels of a thumbnail
COMPRESSION = 1  # zlib's level: three times as fast as the default, for a tenth more bytes
ROWS = pa.schema(
    [
        ("rollout", pa.int32()),
        ("in_prompt", pa.bool_()),
        ("digest", pa.string()),  # digest of the pictures
        ("engine_ids", pa.list_(pa.int32())),
        ("places", pa.list_(pa.int32())),
        ("files", pa.list_(pa.binary())),  # null: an earlier row with this digest has the files
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Images(Media):
    """The processed images of a prompt or of a tool's answer. A rollout has one such rider per answer.

    All completions share one object. Two objects are equal if their digests and texts are equal, because a run has
    only one processor.

        Images("5f...", engine_ids=(11, 90, 13), pictures=(...), inputs={"pixel_values": ...}, places=(1, 2))
    """

    digest: str  # digest of the pictures' sizes and bytes
    engine_ids: tuple[int, ...]  # the text with one placeholder per picture, as the engine takes it
    pictures: tuple[Any, ...]  # PIL images in RGB, in the order of their placeholders; () on ranks that only train
    inputs: Mapping[str, torch.Tensor]  # tensors that the model's forward takes in addition to ids, on the host
    places: tuple[int, ...]  # indices in the text of the tokens that the pictures' features replace
    placeholder: int = -1  # id of the placeholder token

    MARK = b"PICTURES"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Images) and (self.digest, self.engine_ids) == (other.digest, other.engine_ids)

    def __hash__(self) -> int:
        return hash((self.digest, self.engine_ids))

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.inputs.values())

    def for_training(self) -> Images:
        return dataclasses.replace(self, pictures=())

    def shifted(self, tokens: int) -> Images:
        return dataclasses.replace(self, places=tuple(tokens + place for place in self.places))

    def followed_by(self, before: ModelInput, ids: Sequence[int], media: Media | None) -> Images:
        """Return the images of a prompt and of a further turn.

        A placeholder that the model or a user wrote stands for no picture, but the engine would take it for the next
        one's. So the engine gets another token in its place, and puts the placeholder back (see `engine.features`).
        """
        first, second = before.media, media
        assert isinstance(first, Images | None) and isinstance(second, Images | None)

        def plain(ids: Sequence[int]) -> Iterator[int]:
            return (STAND_IN if token == self.placeholder else token for token in ids)

        both = [part for part in (first, second) if part is not None]
        moved = () if second is None else second.shifted(len(before)).places
        return Images(
            digest="+".join(part.digest for part in both),
            engine_ids=(
                *(plain(before.ids) if first is None else first.engine_ids),
                *(plain(ids) if second is None else second.engine_ids),
            ),
            pictures=tuple(picture for part in both for picture in part.pictures),
            inputs={},  # the engine makes its own
            places=(*(first.places if first else ()), *moved),
            placeholder=self.placeholder,
        )

    def thumbnails(self, *more: Media) -> list[bytes]:
        parts = (part for part in (self, *more) if isinstance(part, Images))
        return thumbnails([picture for part in parts for picture in part.pictures])

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple("{}x{}".format(*each.size) for each in self.pictures)

    @classmethod
    def table(cls, rollouts: Sequence[Rollout]) -> bytes:
        """Return the table of a group's pictures: from tools, and from prompts that environments changed."""
        rows: list[tuple[Any, ...]] = []
        written: set[str] = set()
        for index, rollout in enumerate(rollouts):
            of_prompt = rollout.input.media if ENVIRONMENTS in rollout.columns else None
            prompts = [(True, of_prompt)] if isinstance(of_prompt, Images) else []
            for in_prompt, images in (*prompts, *((False, part) for part in rollout.all(cls))):
                files: list[bytes] | None = None
                if images.digest not in written:
                    files = []
                    for picture in images.pictures:
                        file = io.BytesIO()
                        # No colour profile: nothing reads it, and PIL opens no PNG with a profile of a mebibyte.
                        picture.save(file, "PNG", compress_level=COMPRESSION, icc_profile=None)
                        files.append(file.getvalue())
                written.add(images.digest)
                rows.append((index, in_prompt, images.digest, images.engine_ids, images.places, files))
        return table_bytes(cls.MARK, rows, ROWS)

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
        """See `Rider.with_table`."""
        from PIL import Image

        assert encoder is not None, "it has images, which the model doesn't read"
        found, pictures = [*rollouts], dict[str, list[Any]]()
        for row in read_table(reader, cls.MARK, ROWS).to_pylist():
            if row["files"] is not None:
                pictures[row["digest"]] = [Image.open(io.BytesIO(file)) for file in row["files"]]
                assert digest_of(pictures[row["digest"]]) == row["digest"], "a picture isn't the one that was recorded"
            rollout = found[row["rollout"]]
            length = len(rollout.input) if row["in_prompt"] else len(rollout.completion_ids)
            places = row["places"]
            assert places and 0 <= min(places) <= max(places) < length, "a picture's place is wrong"
            images = encoder.again(pictures[row["digest"]], row["engine_ids"], places)
            found[row["rollout"]] = (
                dataclasses.replace(rollout, input=ModelInput(rollout.input.ids, images))
                if row["in_prompt"]
                else rollout.carrying(images)
            )
        return found


def thumbnails(pictures: Sequence[Any]) -> list[bytes]:
    """Convert the first images to small JPEG files; a file of more than THUMBNAIL_BYTES is left out."""
    files = []
    for picture in pictures[:THUMBNAILS]:
        small, file = picture.copy(), io.BytesIO()
        small.info.clear()  # a comment, which would be written too, may be larger than the picture
        small.thumbnail((SIDE, SIDE))
        small.convert("RGB").save(file, "JPEG", quality=70)
        if file.tell() <= THUMBNAIL_BYTES:
            files.append(file.getvalue())
    return files


def digest_of(pictures: Sequence[Any]) -> str:
    """Return a digest of the pictures' sizes and pixels."""
    found = hashlib.blake2b(digest_size=16)
    for picture in pictures:
        found.update(repr(picture.size).encode())
        found.update(picture.tobytes())
    return found.hexdigest()

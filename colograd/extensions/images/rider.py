"""Images of prompts, of tools' answers and of environments, as data that travels with a rollout.

Images of a dataset's rows aren't recorded. Images of tools and environments are written after a group's table as PNG
files, with the positions of their tokens. If several answers have the same images, the files are written once. When
the group is read, the processor computes the pixels again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from ...batch import ModelInput, Rollout
from ...riders import Media
from ...rollout.record_file import read_table, table_bytes
from ...runtime.sizes import THUMBNAIL_BYTES, THUMBNAILS

STAND_IN = 0  # A token id that is the image placeholder of no model.
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")  # Names of model inputs that mark the tokens of images.
ENVIRONMENTS = "environments"  # The column of a rollout with its environment.
SIDE = 64  # Largest side of a thumbnail in pixels.
COMPRESSION = 1  # Compression level of PNG files: three times as fast as the default, for a tenth more bytes.
ROWS = pa.schema(
    [
        ("rollout", pa.int32()),
        ("in_prompt", pa.bool_()),
        ("digest", pa.string()),
        ("engine_ids", pa.list_(pa.int32())),
        ("places", pa.list_(pa.int32())),
        ("files", pa.list_(pa.binary())),  # PNG files. Null if an earlier row with the same digest has the files.
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Images(Media):
    """The processed images of a prompt or of a tool's answer. A rollout carries one `Images` object per answer.

    Completions of one dataset row share its prompt's object. Two objects are equal if their digests and token ids are
    equal, because a run has only one processor.

        Images("5f...", engine_ids=(11, 90, 13), pictures=(...), inputs={"pixel_values": ...}, places=(1, 2))
    """

    digest: str  # Digest of the images' sizes and pixels.
    engine_ids: tuple[int, ...]  # Token ids of the text with one placeholder per image, as input of the engine.
    pictures: tuple[Any, ...]  # PIL images in RGB, in the order of their placeholders. Empty on ranks that only train.
    inputs: Mapping[str, torch.Tensor]  # The forward's further inputs, in host memory. Empty for the engine.
    places: tuple[int, ...]  # Indices in the text of the image tokens. Features replace the embeddings of these tokens.
    placeholder: int = -1  # Id of the placeholder token.

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
        """Join the images of a prompt and of a further turn of the conversation: ``ids`` with their images ``media``. A
        placeholder token that the model or a user wrote stands for no image, but the engine would insert an image
        there. So the engine gets the token `STAND_IN`, and `engine.features` puts the placeholder back afterwards."""
        turns = [(before.media, before.ids), (media and media.shifted(len(before)), ids)]
        both = [part for part, _ in turns if isinstance(part, Images)]
        engine_ids: list[int] = []
        for part, text in turns:
            plain = (STAND_IN if token == self.placeholder else token for token in text)
            engine_ids += part.engine_ids if isinstance(part, Images) else plain
        return Images(
            digest="+".join(part.digest for part in both),
            engine_ids=tuple(engine_ids),
            pictures=tuple(picture for part in both for picture in part.pictures),
            inputs={},  # The engine needs no model inputs. It processes images again.
            places=tuple(place for part in both for place in part.places),
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
        """Return an Arrow table with a group's images: of tools' answers, and of prompts that environments changed."""
        rows: list[tuple[Any, ...]] = []
        written: set[str] = set()
        for index, rollout in enumerate(rollouts):
            of_prompt = rollout.input.media if ENVIRONMENTS in rollout.columns else None
            prompts = [(True, of_prompt)] if isinstance(of_prompt, Images) else []
            for in_prompt, images in (*prompts, *((False, part) for part in rollout.all(cls))):
                files = [io.BytesIO() for _ in images.pictures]
                for picture, file in zip(images.pictures, files, strict=True) if images.digest not in written else ():
                    # Leave the colour profile out. Nothing reads it, and PIL can't open a PNG with a profile of 1 MiB.
                    picture.save(file, "PNG", compress_level=COMPRESSION, icc_profile=None)
                content = None if images.digest in written else [file.getvalue() for file in files]
                written.add(images.digest)
                rows.append((index, in_prompt, images.digest, images.engine_ids, images.places, content))
        return table_bytes(cls.MARK, rows, ROWS)

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
        """Read a table of images from a record, and return the rollouts with these images. ``encoder`` processes
        them."""
        from PIL import Image

        assert encoder is not None, "the record has images, which the model doesn't read"
        found, pictures = [*rollouts], dict[str, list[Any]]()
        for row in read_table(reader, cls.MARK, ROWS).to_pylist():
            if row["files"] is not None:
                pictures[row["digest"]] = [Image.open(io.BytesIO(file)) for file in row["files"]]
                assert digest_of(pictures[row["digest"]]) == row["digest"], "a recorded image differs from its digest"
            rollout, places = found[row["rollout"]], row["places"]
            length = len(rollout.input) if row["in_prompt"] else len(rollout.completion_ids)
            assert places and 0 <= min(places) <= max(places) < length, "a recorded image's place is wrong"
            images = encoder.again(pictures[row["digest"]], row["engine_ids"], places)
            found[row["rollout"]] = (
                dataclasses.replace(rollout, input=ModelInput(rollout.input.ids, images))
                if row["in_prompt"]
                else rollout.carrying(images)
            )
        return found


def thumbnails(pictures: Sequence[Any]) -> list[bytes]:
    """Convert the first THUMBNAILS images to small JPEG files. A file of more than THUMBNAIL_BYTES is left out."""
    files = []
    for picture in pictures[:THUMBNAILS]:
        small, file = picture.copy(), io.BytesIO()
        small.info.clear()  # Remove comments, because a comment may be larger than the image.
        small.thumbnail((SIDE, SIDE))
        small.convert("RGB").save(file, "JPEG", quality=70)
        if file.tell() <= THUMBNAIL_BYTES:
            files.append(file.getvalue())
    return files


def digest_of(pictures: Sequence[Any]) -> str:
    """Return a digest of the sizes and pixels of several images, as a hexadecimal text."""
    found = hashlib.blake2b(digest_size=16)
    for picture in pictures:
        found.update(repr(picture.size).encode())
        found.update(picture.tobytes())
    return found.hexdigest()

"""Images that travel with a rollout (a prompt and one completion).

Records of rollouts hold only the images of tools and environments.
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

STAND_IN = 0  # Replaces a placeholder token that has no image: a token id that is no model's placeholder.
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")  # Model inputs that mark which tokens are of images.
ENVIRONMENTS = "environments"  # Column that only rollouts with environments have.
THUMBNAIL_PIXELS = 64
COMPRESSION = 1  # PNG's level 1 is three times as fast as its default, for a tenth more bytes.
ROWS = pa.schema(
    [
        ("rollout", pa.int32()),
        ("in_prompt", pa.bool_()),
        ("digest", pa.string()),
        ("engine_ids", pa.list_(pa.int32())),
        ("places", pa.list_(pa.int32())),
        ("files", pa.list_(pa.binary())),  # PNG files, or null if an earlier row has this digest
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Images(Media):
    """Images of a prompt or of a tool's answer, processed for the model."""

    digest: str  # Digest of the images' sizes and pixels.
    engine_ids: tuple[int, ...]  # Token ids for the engine, with one placeholder per image.
    pictures: tuple[Any, ...]  # PIL images in RGB. Empty on ranks that only train.
    inputs: Mapping[str, torch.Tensor]  # The model's inputs beside token ids, such as pixels, in host memory.
    places: tuple[int, ...]  # Indices of the image tokens among the token ids.
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
        """Join the images of the prompt ``before`` and the images ``media`` of the tokens ``ids`` that follow it.

        If ``before`` or ``ids`` has no images, `STAND_IN` replaces placeholder tokens in it, because vLLM would put an
        image in the place of each.
        """
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
            inputs={},  # not needed: the engine processes images itself
            places=tuple(place for part in both for place in part.places),
            placeholder=self.placeholder,
        )

    def thumbnails(self, *more: Media) -> list[bytes]:
        """Return JPEG files of the first THUMBNAILS images. Files of more than THUMBNAIL_BYTES are left out."""
        parts, files = (part for part in (self, *more) if isinstance(part, Images)), list[bytes]()
        for picture in [picture for part in parts for picture in part.pictures][:THUMBNAILS]:
            small, file = picture.copy(), io.BytesIO()
            small.info.clear()  # without the picture's comment, which may be larger than the thumbnail
            small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
            small.convert("RGB").save(file, "JPEG", quality=70)
            if file.tell() <= THUMBNAIL_BYTES:
                files.append(file.getvalue())
        return files

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple("{}x{}".format(*each.size) for each in self.pictures)

    @classmethod
    def table(cls, rollouts: Sequence[Rollout]) -> bytes:
        """Return the bytes of an Arrow table with the images of tools and environments."""
        rows: list[tuple[Any, ...]] = []
        written: set[str] = set()
        for index, rollout in enumerate(rollouts):
            of_prompt = rollout.input.media if ENVIRONMENTS in rollout.columns else None
            prompts = [(True, of_prompt)] if isinstance(of_prompt, Images) else []
            for in_prompt, images in (*prompts, *((False, part) for part in rollout.all(cls))):
                files = [io.BytesIO() for _ in images.pictures]
                for picture, file in zip(images.pictures, files, strict=True) if images.digest not in written else ():
                    # No colour profile, because PIL can't open a PNG with a profile of more than 1 MiB.
                    picture.save(file, "PNG", compress_level=COMPRESSION, icc_profile=None)
                content = None if images.digest in written else [file.getvalue() for file in files]
                written.add(images.digest)
                rows.append((index, in_prompt, images.digest, images.engine_ids, images.places, content))
        return table_bytes(cls.MARK, rows, ROWS)

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
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


def digest_of(pictures: Sequence[Any]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for picture in pictures:
        found.update(repr(picture.size).encode())
        found.update(picture.tobytes())
    return found.hexdigest()

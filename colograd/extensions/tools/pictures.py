"""Recorded pictures: a tool or an environment made them, so no dataset has them.

They stand behind a group's table as PNG files, each picture once, with the places of their tokens. The model's
processor computes their pixels again when the group is read.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ...batch import ModelInput, Rollout
from ...rollout.marked_table import comes, read_table, table_bytes
from ..images.data import ImageReader, digest_of

BEGIN = b"PICTURES"
ENVIRONMENTS = "environments"  # the rollout's column with its environment
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


def pictures_bytes(rollouts: Sequence[Rollout]) -> bytes:
    """Return the table of a group's pictures: from tools, and from prompts that environments changed."""
    rows: list[tuple[Any, ...]] = []
    seen: set[str] = set()
    for index, rollout in enumerate(rollouts):
        begun = rollout.input.images if ENVIRONMENTS in rollout.columns else None
        for in_prompt, images in (*([(True, begun)] if begun else []), *((False, of) for of in rollout.images)):
            files = None if images.digest in seen else [_file_of(picture) for picture in images.pictures]
            seen.add(images.digest)
            rows.append((index, in_prompt, images.digest, images.engine_ids, images.places, files))
    return table_bytes(BEGIN, rows, ROWS)


def with_pictures(reader: Any, rollouts: Sequence[Rollout], images: ImageReader | None) -> tuple[Rollout, ...]:
    """Return the rollouts with their pictures from the table.

    Raises:
        AssertionError: the run's model reads no images, or a picture isn't the one that was recorded.
    """
    if reader.tell() == reader.size():
        return tuple(rollouts)
    assert comes(reader, BEGIN), "unknown content"
    assert images is not None, "it has images, which the model doesn't read"
    found, pictures = [*rollouts], dict[str, list[Any]]()
    for row in read_table(reader, BEGIN, ROWS).to_pylist():
        if row["files"] is not None:
            pictures[row["digest"]] = [_picture_of(file) for file in row["files"]]
            assert digest_of(pictures[row["digest"]]) == row["digest"], "a picture isn't the one that was recorded"
        rollout = found[row["rollout"]]
        length = len(rollout.input) if row["in_prompt"] else len(rollout.completion_ids)
        assert row["places"] and 0 <= min(row["places"]) <= max(row["places"]) < length, "a picture's place is wrong"
        made = images.again(pictures[row["digest"]], row["engine_ids"], row["places"])
        if row["in_prompt"]:
            rollout = dataclasses.replace(rollout, input=ModelInput(rollout.input.ids, made))
        else:
            rollout = dataclasses.replace(rollout, images=(*rollout.images, made))
        found[row["rollout"]] = rollout
    return tuple(found)


def _file_of(picture: Any) -> bytes:
    file = io.BytesIO()
    # Drop the colour profile: nothing reads it, and PIL opens no PNG with a profile of a mebibyte.
    picture.save(file, "PNG", compress_level=COMPRESSION, icc_profile=None)
    return file.getvalue()


def _picture_of(file: bytes) -> Any:
    from PIL import Image

    picture = Image.open(io.BytesIO(file))
    picture.load()
    return picture

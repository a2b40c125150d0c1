"""Small pictures of a prompt's images, for people: a few, of few bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

MOST = 4  # of a prompt
SIDE = 64  # pixels
BYTES = 4096  # of one
PREFIX = "data:image/jpeg;base64,"


def thumbnails(pictures: Sequence[Any]) -> list[bytes]:
    """The first images as JPEG files; one of more than BYTES is left out."""
    found = []
    for picture in pictures[:MOST]:
        small, file = picture.copy(), io.BytesIO()
        small.info.clear()  # a comment, which would be written too, may be larger than the picture
        small.thumbnail((SIDE, SIDE))
        small.convert("RGB").save(file, "JPEG", quality=70)
        if file.tell() <= BYTES:
            found.append(file.getvalue())
    return found


def data_url(file: bytes) -> str:
    return PREFIX + base64.b64encode(file).decode()

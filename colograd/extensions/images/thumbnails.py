"""Small pictures of a prompt's images, for people: few pictures with few bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

MOST = 4  # pictures of a prompt
SIDE = 64  # pixels
BYTES = 4096  # bytes of one picture
PREFIX = "data:image/jpeg;base64,"


def thumbnails(pictures: Sequence[Any]) -> list[bytes]:
    """Convert the first images to JPEG files; a file of more than BYTES is left out."""
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

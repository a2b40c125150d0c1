"""Small pictures of a prompt's images, for people: few pictures with few bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ...runtime.sizes import THUMBNAIL_BYTES, THUMBNAILS

SIDE = 64  # pixels


def thumbnails(pictures: Sequence[Any]) -> list[bytes]:
    """Convert the first images to JPEG files; a file of more than THUMBNAIL_BYTES is left out."""
    found = []
    for picture in pictures[:THUMBNAILS]:
        small, file = picture.copy(), io.BytesIO()
        small.info.clear()  # a comment, which would be written too, may be larger than the picture
        small.thumbnail((SIDE, SIDE))
        small.convert("RGB").save(file, "JPEG", quality=70)
        if file.tell() <= THUMBNAIL_BYTES:
            found.append(file.getvalue())
    return found

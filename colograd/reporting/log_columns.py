"""The columns of a file of completions, for who writes it and who reads it (without torch)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

FOLDER = "completions"
TEXT = "completion"  # the column of what rows hold as UTF-8
FIXED = (
    "step", "position", "prompt", TEXT, "prompt_tokens", "completion_tokens", "finish_reason", "advantage",
)  # fmt: skip
IMAGES = "image"  # of models that read images: a prompt's small pictures, as `datasets` has images (TRL's name)
SIZES = "image_size"  # and how large all of its images are, as in "640x480"
NAMES_KEY = b"colograd.reward_names"  # of the file's metadata: which columns are rewards, in order
EXTRA_KEY = b"colograd.extra_names"  # likewise, which ones reward functions logged
IMAGES_KEY = b"colograd.images"  # it is there where the file has the columns of images


def column_names(
    reward_names: Sequence[str], extra: Sequence[str], images: bool = False
) -> tuple[list[str], list[str]]:
    """The columns of rewards and of what was logged: their names, unless an earlier column has it.

    images: whether the file has the columns of images.
    """
    taken = (*FIXED, IMAGES, SIZES) if images else FIXED
    rewards = [f"rewards/{name}" if name in taken else name for name in reward_names]
    return rewards, [f"extra/{name}" if name in (*taken, *rewards) else name for name in extra]


def prompt_of(logged: Any) -> Any:
    """A prompt as it was given, which stands there as JSON where parquet had no type for its messages."""
    if isinstance(logged, str) and logged.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(logged)
            if found and isinstance(found, list) and all(isinstance(message, dict) for message in found):
                return found
    return logged

"""JSON and texts that models, tools and programs write: a value that UTF-8 can hold, or a ValueError."""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 64  # lists and objects in each other: templates, copies and pickles of deeper ones exceed Python's stack

# Characters of a token: a longer text than this per token that has room isn't tokenised, which takes 4 s per megabyte.
# Texts in any language have fewer on average; only a run of spaces may have more.
CHARACTERS = 16


def parse_json(text: str | bytes, finite: bool = False) -> Any:
    """Parse JSON, with lone surrogates replaced.

    Args:
        finite: NaN and infinities are errors.

    Raises:
        ValueError: the text is no JSON, or is nested more than DEEPEST deep.
    """
    try:
        return clean(json.loads(text), finite)
    except RecursionError:
        raise _too_deep() from None


def clean(value: Any, finite: bool = False, depth: int = DEEPEST) -> Any:
    """Replace lone surrogates in a text, or in all texts of nested lists, tuples and dicts. Other objects stay as they
    are.

    Raises:
        ValueError: as `parse_json`.
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and finite and not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number")
    if type(value) not in (list, tuple, dict):
        return value
    if depth == 0:
        raise _too_deep()
    if isinstance(value, dict):
        return {clean(name): clean(each, finite, depth - 1) for name, each in value.items()}
    return type(value)(clean(each, finite, depth - 1) for each in value)


def storable(value: Any) -> Any:
    """A value that can be written as JSON where its objects can: the error's text for one that is nested too deep."""
    try:
        return clean(value)
    except ValueError as error:
        return f"({error})"


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested more than {DEEPEST} deep")

"""JSON and texts from models, tools and programs: they become values that UTF-8 can encode, or raise ValueError."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

DEEPEST = 64  # maximum nesting of lists and objects: templates, copies and pickles of deeper ones exceed Python's stack

# Maximum characters per token: a text with more characters than this times the free tokens isn't tokenised, as that
# takes 4 s per megabyte. Texts in any language have fewer on average; only a run of spaces may have more.
CHARACTERS = 16


def parse_json(text: str | bytes, finite: bool = False) -> Any:
    """Parse JSON, with lone surrogates replaced."""
    try:
        return clean(json.loads(text), finite)
    except RecursionError:
        raise _too_deep() from None


def clean(value: Any, finite: bool = False, depth: int = DEEPEST) -> Any:
    """Replace lone surrogates in a text, or in all texts of nested lists, tuples and dicts. Keep other objects."""
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
    """Return a value that can be written as JSON if its objects can. A value nested too deep becomes an error text."""
    try:
        return clean(value)
    except ValueError as error:
        return f"({error})"


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested more than {DEEPEST} deep")


def printable(text: str) -> str:
    """Replace the characters that standard output can't encode, because they must not end a run."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)

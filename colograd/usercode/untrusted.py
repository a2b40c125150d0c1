"""Parse JSON and texts from models, tools and programs into values that UTF-8 can encode, or raise ValueError. Copy
arguments for the user's code, because a function that changes its arguments would change trainer data."""

from __future__ import annotations

import copy
import json
import math
import sys
from typing import Any

DEEPEST = 64  # Maximum nesting of JSON values. Templates, copies and pickles of deeper values exceed Python's stack.
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} deep"
# Maximum characters per token. A text with more characters than this number times the tokens left in the context isn't
# tokenised, because tokenising takes 4 s per megabyte. Average tokens of all languages are shorter.
CHARACTERS = 16
UNCHANGING = frozenset((str, int, float, bool, bytes, type(None)))
# `own_copy` copies objects of classes in these modules and in PIL. Others, such as environments, belong to the user.
OF_DATA = frozenset(("builtins", "collections", "array", "numpy", "torch"))


def parse_json(text: str | bytes, finite: bool = False) -> Any:
    """Parse JSON. Lone surrogates, which UTF-8 can't encode, are replaced. ``finite`` refuses NaN and infinity."""
    try:
        return clean(json.loads(text), finite)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def clean(value: Any, finite: bool = False, depth: int = DEEPEST) -> Any:
    """Replace lone surrogates in a text, or in all texts of nested lists, tuples and dicts. Keep other objects. Raise a
    ValueError for a nesting of more than ``depth``, and with ``finite`` for NaN and infinity."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and finite and not math.isfinite(value):
        raise ValueError(f"{value} is no number that JSON allows")
    if type(value) not in (list, tuple, dict):
        return value
    if depth == 0:
        raise ValueError(TOO_DEEP)
    if isinstance(value, dict):
        return {clean(name): clean(each, finite, depth - 1) for name, each in value.items()}
    return type(value)(clean(each, finite, depth - 1) for each in value)


def storable(value: Any) -> Any:
    """Return ``value`` with lone surrogates replaced. If ``value`` is nested too deep, return a text with the error."""
    try:
        return clean(value)
    except ValueError as error:
        return f"({error})"


def printable(text: str) -> str:
    """Replace characters that standard output can't encode, because an encoding error would end the run."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def own_copy(value: Any) -> Any:
    """Deep-copy an argument for one call of the user's code. Immutable values, objects of the user's classes, and
    objects that can't be copied are returned without a copy."""
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if kind is list:
        return [each if type(each) in UNCHANGING else own_copy(each) for each in value]
    if kind is dict:
        return {key: each if type(each) in UNCHANGING else own_copy(each) for key, each in value.items()}
    if kind is tuple:
        return tuple(map(own_copy, value))
    if kind.__module__ not in OF_DATA and not kind.__module__.startswith("PIL."):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # Some objects can't be copied, for example generators or tensors with a gradient.
        return value

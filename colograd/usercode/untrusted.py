"""Make texts and JSON of models, tools and programs encodable as UTF-8, and copy arguments for user code."""

from __future__ import annotations

import copy
import json
import math
import sys
from typing import Any

DEEPEST = 64  # Maximum depth of nested JSON. Templates, copies and pickles of deeper values may exceed Python's stack.
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} deep"
# A text with more characters per free token of the context is too long. Tokenising it takes 4 s per megabyte.
CHARACTERS = 16
UNCHANGING = frozenset((str, int, float, bool, bytes, type(None)))
# `own_copy` copies objects of classes in these modules and in PIL. Other objects, such as environments, are shared.
OF_DATA = frozenset(("builtins", "collections", "array", "numpy", "torch"))


def parse_json(text: str | bytes, finite: bool = False) -> Any:
    """Parse JSON and apply `clean`. Raise ValueError for invalid JSON, and with ``finite`` for NaN or infinity."""
    try:
        return clean(json.loads(text), finite)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def clean(value: Any, finite: bool = False, depth: int = DEEPEST) -> Any:
    """Replace lone surrogates in all texts of a value, because UTF-8 can't encode them.

    Raise ValueError for lists and dicts nested deeper than ``depth``, and with ``finite`` for NaN or infinity."""
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
    try:
        return clean(value)
    except ValueError as error:
        return f"({error})"


def printable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def own_copy(value: Any) -> Any:
    """Deep-copy an argument for user code, because user code may change the argument.

    An object is shared, not copied, if copying fails, or if its class is in no module of `OF_DATA` and not in PIL."""
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
    except Exception:  # E.g. generators and tensors with a `grad_fn` can't be copied.
        return value

"""Copies of arguments for the user's code, because a function that changes its arguments would change trainer data."""

from __future__ import annotations

import copy
from typing import Any

UNCHANGING = frozenset((str, int, float, bool, bytes, type(None)))
# Modules with classes that `own_copy` copies. Objects of other classes, such as environments, belong to the user.
OF_DATA = frozenset(("builtins", "collections", "array", "numpy", "torch"))


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

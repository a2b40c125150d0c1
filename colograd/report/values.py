"""Values of a run's files, bounded and of the type that they should have; another type, NaN or an infinity is None."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

LARGEST_STEP = 2**53  # a number that JavaScript holds exactly
LONGEST_TEXT = 4_000  # characters of a text that isn't a completion's


def number(value: Any, digits: int = 5) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        if not math.isfinite(value):
            return None
        if isinstance(value, int) and abs(value) < LARGEST_STEP:
            return value
        found = float(f"{value:.{digits}g}")
    except OverflowError:
        return None
    return int(found) if found.is_integer() and abs(found) < LARGEST_STEP else found


def whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST_STEP:
        return None
    return value


def text(value: Any, longest: int = LONGEST_TEXT) -> str:
    """A text that UTF-8 can hold, cut if it is too long; "" for another type."""
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= longest else value[:longest] + " …"
    return cut.encode(errors="replace").decode()


def texts(value: Any, most: int, longest: int) -> list[str]:
    return [text(item, longest) for item in items(value)[:most] if isinstance(item, str)]


def entries(value: Any, most: int, bounded: Callable[[Any], Any]) -> dict[str, Any]:
    return {text(str(name), 200): bounded(each) for name, each in list(mapping(value).items())[:most]}


def plain(value: Any, depth: int = 6) -> Any:
    """Any JSON value with bounded texts, lists and depth, and finite numbers."""
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return number(value, 12)
    if depth and isinstance(value, list):
        return [plain(item, depth - 1) for item in value[:256]]
    if depth and isinstance(value, dict):
        return entries(value, 512, lambda item: plain(item, depth - 1))
    return None if isinstance(value, (list, dict)) else text(str(value))


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

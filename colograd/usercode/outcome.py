"""How a call of the user's code ended, wherever it ran."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    kind: str  # value, raised, late, died or dropped
    value: Any  # what was returned; (line, traceback) of what was raised; the exit status of what died
    seconds: float  # in the function
    logged: tuple[dict[str, list[Any]], dict[str, list[float]]] = ({}, {})  # columns and metrics, see `CallLog`


def raised_outcome(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    text = "".join(traceback.format_exception(error))
    return Outcome("raised", (f"{type(error).__name__}: {error}", text), 0.0)

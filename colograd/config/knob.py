"""What every group of knobs is written with: `knob` declares one, `one_of` and `at_least` are its commonest rules."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def knob(default: Any, meaning: str) -> Any:
    """A dataclass field; ``meaning`` is its help on the command line and in docs/configuration.md."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": meaning})
    return field(default=default, metadata={"help": meaning})


def one_of(group: object, name: str, allowed: tuple[str, ...], note: str = "") -> None:
    """Raises ValueError where ``name`` has another value than those ``allowed``."""
    value = getattr(group, name)
    if value not in allowed:
        raise ValueError(f"{name} {value!r} isn't supported{note}: choose one of {', '.join(allowed)}.")


def at_least(group: object, least: float, *names: str) -> None:
    """Raises ValueError where one of ``names`` is below ``least``; None passes."""
    for name in names:
        value = getattr(group, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}, but must be at least {least:g}: raise it.")

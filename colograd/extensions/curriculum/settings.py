"""`Curriculum`: the parsed setting `curriculum`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from ...config import GRPOConfig
from ...config.conflicts import ANY, SET, Conflict, equal

# Pools of prompts by their last pass rate, if `column` isn't set. Prompts in "new" have no pass rate.
LEVELS = ("new", "hard", "medium", "easy")
EXAMPLE = "{solved_at: 1.0, revisit_after: 2}"
CONFLICTS = (
    Conflict(
        "curriculum", ANY, "dynamic_sampling", SET,
        "both choose further prompts, by different rules", "remove one of them",
    ),
    Conflict(
        "curriculum", ANY, "the dataset", equal("a stream"),
        "it chooses among all prompts, and a stream is read one after the other", "load it whole, or remove curriculum",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """A number by optimizer step: linear between given points, and constant before the first and after the last."""

    points: tuple[tuple[int, float], ...]  # (optimizer step, number), ascending

    @classmethod
    def of(cls, value: Any, name: str) -> Schedule:
        """Parse a constant such as ``0.5``, or numbers by optimizer step such as ``{0: 1.0, 200: 0.2}``."""
        given = value.items() if isinstance(value, Mapping) and value else [(0, value)]
        with contextlib.suppress(TypeError, ValueError):
            points = sorted((int(step), float(number)) for step, number in given)
            if all(step >= 0 and not math.isnan(number) for step, number in points):
                return cls(tuple(points))
        rule = "must be a number, or a mapping from optimizer steps (0 or more) to numbers: {0: 1.0, 200: 0.2}"
        raise ValueError(f"{name} is {value!r}, but {rule}.")

    def at(self, step: int) -> float:
        before, low = self.points[0]
        for after, high in self.points:
            if step < after:
                return low if after == before else low + (high - low) * (step - before) / (after - before)
            before, low = after, high
        return low


@dataclass(frozen=True, slots=True)
class Curriculum:
    pass_threshold: float = 1.0  # A completion passes with at least this combined reward.
    solved_at: float | None = 1.0  # A prompt is solved if its last pass rate is at least this. None: never.
    revisit_after: float = 1.0  # Epochs in which a solved prompt isn't drawn while others are left.
    column: str | None = None  # Dataset column with each row's pool. None: `LEVELS`.
    shares: Mapping[str, Schedule] | None = None
    difficulty: str | None = None
    difficulty_until: Schedule | None = None  # Highest difficulty to draw while enough rows are left.

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Curriculum:
        known, found = [field.name for field in fields(cls)], dict(given)
        if unknown := [key for key in given if key not in known]:
            raise ValueError(f"curriculum: {unknown[0]!r} isn't one of the keys {', '.join(known)}, as in {EXAMPLE}.")
        for name in ("pass_threshold", "solved_at", "revisit_after"):
            value = found.get(name, 0.0)
            is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number and not (value is None and name == "solved_at"):
                raise ValueError(f"curriculum: `{name}` is {found[name]!r}, but must be a finite number.")
        if (shares := found.get("shares")) is not None:
            if not isinstance(shares, Mapping) or not shares:
                example = "{hard: 0.5, new: 0.5}"
                raise ValueError(f"curriculum: `shares` is {shares!r}, but must be a mapping such as {example}.")
            found["shares"] = {str(k): Schedule.of(v, f"curriculum: the share of {k}") for k, v in shares.items()}
        if found.get("difficulty_until") is not None:
            found["difficulty_until"] = Schedule.of(found["difficulty_until"], "curriculum: `difficulty_until`")
        return cls(**found)

    def __post_init__(self) -> None:
        if self.solved_at is not None and not 0 < self.solved_at <= 1:
            rule = "above 0 and at most 1, or null (then no prompt counts as solved)"
            raise ValueError(f"curriculum: `solved_at` (a pass rate) is {self.solved_at}, but must be {rule}.")
        if self.revisit_after < 0:
            raise ValueError(f"curriculum: revisit_after is {self.revisit_after}, but must be at least 0: raise it.")
        if self.column is not None and self.shares is None:
            remedy = "set a share for each value in the column"
            raise ValueError(f"curriculum: `column` is {self.column!r}, but `shares` isn't set: {remedy}.")
        if self.shares is not None:
            if any(not 0 <= value < math.inf for share in self.shares.values() for _, value in share.points):
                raise ValueError("curriculum: a share is negative or infinite: give finite shares of at least 0.")
            if self.column is None and (other := [pool for pool in self.shares if pool not in LEVELS]):
                problem = f"`shares` has the pool {other[0]!r}, but without `column` the only pools are"
                remedy = "name one of these pools, or set `column`"
                raise ValueError(f"curriculum: {problem} {', '.join(LEVELS)}: {remedy}.")
        if (self.difficulty is None) != (self.difficulty_until is None):
            raise ValueError("curriculum: set `difficulty` (a column) and `difficulty_until` (its limit), or neither.")


def read_curriculum(config: GRPOConfig) -> Curriculum | None:
    settings = config.curriculum
    if isinstance(settings, dict | None):
        return None if settings is None else Curriculum.of(settings)
    raise ValueError(f"curriculum is {settings!r}, but must be a mapping: write it as {EXAMPLE}.")

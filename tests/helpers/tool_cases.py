"""Tools and environments that tests give to trainers. Importable, so that they travel to workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Any


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number
        b: another
    """
    return a + b


def slow_add(a: int, b: int) -> int:
    """Adds, after a while that depends on the numbers.

    Args:
        a: one number
        b: another
    """
    time.sleep((a * 7 + b * 3) % 10 / 20)
    return a + b


def scan(trainer_state: str, log_metric: str) -> str:
    """Has parameters that a reward function would get from the trainer.

    Args:
        trainer_state: a text
        log_metric: a text
    """
    return f"{trainer_state} {log_metric}"


def hangs(a: int, b: int) -> int:
    """Never comes back.

    Args:
        a: one number
        b: another
    """
    while True:
        time.sleep(1)


def ends(a: int, b: int) -> int:
    """Ends its process.

    Args:
        a: one number
        b: another
    """
    os._exit(3)


def fails(a: int, b: int) -> int:
    """Raises.

    Args:
        a: one number
        b: another
    """
    raise ZeroDivisionError("division by zero")


async def waits(a: int, b: int) -> int:
    """Adds, after a second.

    Args:
        a: one number
        b: another
    """
    await asyncio.sleep(1)
    return a + b


async def exits(a: int, b: int) -> int:
    """Asks the process to end.

    Args:
        a: one number
        b: another
    """
    raise SystemExit(0)


async def clings(a: int, b: int) -> int:
    """Takes no notice when it is cancelled.

    Args:
        a: one number
        b: another
    """
    for _ in range(100):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
    return a + b


def alarmed(a: int, b: int) -> int:
    """Adds, with a time limit that only the main thread can have.

    Args:
        a: one number
        b: another
    """
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        return a + b
    finally:
        signal.signal(signal.SIGALRM, before)


def rows(a: int, b: int) -> list[Any]:
    """Finds rows.

    Args:
        a: one number
        b: another
    """
    return [(a, b), {"type": "row"}]


class Alarmed:
    """All of its methods want the main thread, and remember their order."""

    def reset(self, **row: Any) -> str:
        self.order = [alarmed(0, 0)]
        return "so"

    def step(self, by: int) -> str:
        """Goes on.

        Args:
            by: how far
        """
        self.order.append(alarmed(by, 0))
        return str(self.order)

    def look(self) -> str:
        """Looks."""
        return str(self.order)

    def get_reward(self) -> float:
        return alarmed(len(self.order), 0)


class Counter:
    """Counts up from the row's column ``start``, and rewards itself with the sum."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.value = -1

    def reset(self, start: int = 0, **row: Any) -> str:
        self.value = start
        return f" from {start}"

    def count(self, by: int) -> int:
        """Counts up.

        Args:
            by: how far
        """
        self.value += by
        return self.value

    def stall(self) -> None:
        """Never comes back."""
        while True:
            time.sleep(1)

    def get_reward(self) -> float:
        return float(self.value)


class Silent:
    """Begins without a word, and leaves the reward to others."""

    def reset(self, **row: Any) -> None:
        return None

    async def ask(self, what: str) -> str:
        """Answers.

        Args:
            what: anything
        """
        return f"{what}!"

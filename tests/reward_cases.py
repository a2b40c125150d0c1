"""Reward functions that end in every way a function can. A module of its own, because workers import it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def lengths(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
    return [len(c) + a for c, a in zip(completions, answer, strict=True)]


def process_id(completions: list[str]) -> list[float]:
    return [float(os.getpid())] * len(completions)


def hanging(**kwargs: Any) -> list[float]:
    while True:
        pass


def dying(**kwargs: Any) -> list[float]:
    os._exit(7)


def raising(**kwargs: Any) -> list[float]:
    raise KeyError("no such test case")


def leaving(**kwargs: Any) -> list[float]:
    sys.exit("enough")


def with_alarm(completions: list[str], **kwargs: Any) -> list[float]:
    """As time-outs are written: only possible on a main thread."""

    def ring(*args: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError:
        return [0.5] * len(completions)
    return [0.0] * len(completions)


def loud(completions: list[str], **kwargs: Any) -> list[float]:
    sys.stderr.write("x" * 2**20)
    return [1.0] * len(completions)

"""Calls of user code with a time limit."""

from __future__ import annotations

import threading
import time

import pytest
import tiny

from colograd.usercode.calls import Late, time_limit


def test_an_interrupt_comes_after_all_timers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt of a thread that starts another could end the other thread, and the first would wait forever."""
    timers: list[threading.Timer] = []

    def start_slowly(timer: threading.Timer) -> None:
        timers.append(timer)
        threading.Thread.start(timer)
        time.sleep(0.1)

    monkeypatch.setattr(threading.Timer, "start", start_slowly)
    with pytest.raises(Late), time_limit(0, "late"):
        time.sleep(tiny.PATIENCE)
    assert len(timers) == 2 and all(timer.finished.is_set() for timer in timers)

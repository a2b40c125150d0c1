"""How requests that come together get into one batch, without an engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from colograd.engine.sampling import Sampling
from colograd.extensions.agents import decoding
from colograd.extensions.agents.decoding import Work, WorkQueue

NOBODY: Any = None  # waits for the answer


def work(number: int) -> Work:
    return Work((number,), Sampling(1, 1, 1.0, {}), number, future=NOBODY)


def test_requests_of_sessions_that_begin_together_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PAUSE", 60.0)  # however slow the thread is
    queue, others = WorkQueue(), [work(number) for number in range(1, 5)]
    queue.gather(5, 60.0)  # nothing has come: there is nothing to wait for
    queue.put(work(0))
    thread = threading.Thread(target=lambda: [queue.put(each) for each in others])
    thread.start()
    queue.gather(5, 60.0)
    assert len(queue.take()[0]) == 5
    thread.join()


def test_sessions_that_ask_later_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PAUSE", 0.001)
    queue = WorkQueue()
    queue.put(work(0))
    queue.gather(5, 1e6)  # none comes any more
    assert len(queue.take()[0]) == 1
    monkeypatch.setattr(decoding, "PAUSE", 1e6)
    queue.put(work(0))
    queue.gather(5, 0.001)  # a step would be over by now
    assert len(queue.take()[0]) == 1

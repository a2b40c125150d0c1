"""What a run's lines say: when it will end, and lengths of time as people say them."""

from __future__ import annotations

import time
from datetime import datetime
from types import SimpleNamespace

import pytest

from colograd.reporting.console import RECENT, Console, duration, until


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (720, "12 min"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_lengths_of_time(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_end_has_a_date_where_it_is_another_day() -> None:
    now = datetime(2026, 5, 1, 23, 30)
    assert (until(600, now), until(3600, now)) == ("23:40", "2026-05-02 00:30")


def test_a_step_s_line_says_when_the_run_will_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    console = Console(enabled=True, bars=False)
    console.on_train_begin(None, SimpleNamespace(max_steps=100, global_step=10), None)
    for step in range(11, 101):
        clock[0] += 60 if step <= 50 else 6  # it gets faster
        console.step(step, 100, {"reward": 0.5, "train/packed_tokens": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert " | 89 min left, until " in lines[0], "from the first step on, also of a resumed run"
    assert " | 3 min left, until " in lines[50 + RECENT - 11], "by the last steps"
    assert "left" not in lines[-1]

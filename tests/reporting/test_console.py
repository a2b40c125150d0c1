"""Lines of a run's console: when it will end, and lengths of time as people say them."""

from __future__ import annotations

import time
from datetime import datetime
from types import SimpleNamespace

import pytest

from colograd.reporting import console as console_module
from colograd.reporting.console import RECENT, Console, duration, reward_ends, until


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
    assert " | 89 min left (" in lines[0], "from the first step on, also of a resumed run"
    assert " | 3 min left (" in lines[50 + RECENT - 11], "by the last steps"
    assert "left" not in lines[-1]


def test_the_last_rewards_are_none_of_the_first() -> None:
    assert [reward_ends([]), reward_ends([0.5])] == ["", ", mean reward 0.500"]
    assert reward_ends([0.0, 0.5, 1.0]) == ", mean reward 0.000 at first, 1.000 at last"
    assert reward_ends([0.1] * 5 + [0.5, 1.0] * 20).endswith("0.800 at last")


@pytest.mark.parametrize(
    ("steps", "factor", "left", "shown"),
    [
        (28, 1, "5 min left (14:32)", "12.50 s: generate 5.84 (308 tok/s), train 6.51 (252 tok/s) | 5 min"),
        (10_000, 100, "10 h 05 min left (2026-05-01 14:32)", "1250.00 s: generate 584.00, train 651.00 | 10 h"),
    ],
)
def test_step_lines_show_long_phases_in_120_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, steps: int, factor: int, left: str, shown: str
) -> None:
    monkeypatch.setattr(Console, "_time_left", lambda *_: left)
    seconds = {"publish": 0.001, "journal": 0.02, "generate": 5.84, "train": 6.51, "sync": 0.0, "optimizer": 0.13}
    metrics = {f"time/{name}": factor * spent for name, spent in seconds.items()} | {"step_time": 12.5 * factor}
    metrics |= {"reward": 0.312, "train/sampled_tokens": 1800.0 * factor, "train/packed_tokens": 1640.0 * factor}
    Console(enabled=True, bars=False).step(3, steps, metrics)
    (line,) = capsys.readouterr().out.splitlines()
    assert shown in line and len(line) <= 120


def test_the_first_long_step_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    console = Console(enabled=True, bars=True)  # there is no terminal
    for step in (1, 2):
        progress = console.progress(8, "generate", "group")
        for part in range(8):
            clock[0] += 3
            progress.sampled(30)  # each after as many seconds
            clock[0] += 3
            progress.sampled(30)
            if part:
                progress.update(60)
        console.step(step, 2, {"train/packed_tokens": 1.0})
    assert capsys.readouterr().out.splitlines()[:-2] == [
        "generate: 0 of 8 groups in 12 s, 10 tok/s",
        "generate: 2 of 8 groups in 24 s, 10 tok/s",
        "generate: 6 of 8 groups in 48 s, 10 tok/s",
    ]


def test_progress_writes_plurals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "LONG", 0.0)
    lines: list[str] = []
    console_module.Progress(3, "train", "micro-batch", shown=False, tell=lines.append).update(60)
    assert lines[0].startswith("train: 1 of 3 micro-batches in ")

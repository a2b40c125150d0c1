"""No diagnosis ends training: a file that can't be written is one warning."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny
import torch
from transformers.integrations import TensorBoardCallback

from colograd.batch import FinishReason, Group, Logged, Rollout, ScoredGroup
from colograd.extensions.recording.completion_log import CompletionLog
from colograd.extensions.recording.completions import CompletionRow, read_log, write_log
from colograd.extensions.recording.event_log import EventLog
from colograd.extensions.recording.recorder import Recorder
from colograd.extensions.recording.trackers import spare_from_trackers
from colograd.reporting.console import Console
from colograd.usercode.untrusted import storable

DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
FULL = OSError(28, "No space left on device")


def a_row(value: Any) -> CompletionRow:
    return CompletionRow(1, 0, "p", b"c", 1, 1, "stop", (1.0,), 0.0, {"x": storable(value)})


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([{}, {}], ["{}", "{}"]),
        ([{"a": {}}, None], ["{'a': {}}", None]),
        (["caf\udce9", None], ["caf?", None]),
        ([{"\ud83d": ["\ud83d"]}, None], [{"?": ["?"]}, None]),
        ([{"a": 1}, {"b": "x"}], [{"a": 1, "b": None}, {"a": None, "b": "x"}]),
        ([1, "x"], ["1", "x"]),
        ([10**30, 1.5], [str(10**30), "1.5"]),
        ([DEEP, 1], ["(lists and objects are nested more than 64 deep)", "1"]),
        ([ITSELF, 1], ["(lists and objects are nested more than 64 deep)", "1"]),
        ([math.nan, (1, 2)], ["nan", "(1, 2)"]),
    ],
)
def test_logged_values_of_any_shape_are_written(tmp_path: Path, values: list[Any], read: list[Any]) -> None:
    path = write_log(tmp_path, [a_row(value) for value in values], ["r"], 1)
    assert pq.read_table(path).column("x").to_pylist() == read
    assert [row.extra["x"] for row in read_log(path)[0]] == read


@pytest.mark.parametrize("prompt", [[{}], "caf\udce9", [{"role": "user", "content": "\ud83d"}], None, [object()]])
def test_prompts_of_any_shape_are_written(tmp_path: Path, prompt: Any) -> None:
    rows = [CompletionRow(1, 0, prompt, b"c", 1, 1, "stop", (1.0,), 0.0)] * 2
    assert len(read_log(write_log(tmp_path, rows, ["r"], 1))[0]) == 2


def test_a_completions_log_that_fails_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "completions").write_text("in the way")
    said: list[str] = []
    log = CompletionLog(tiny.config(tmp_path, log_completions=True), ["r"], warn=said.append)
    rollout = Rollout((1,), (2,), torch.zeros(1), torch.ones(1, dtype=torch.bool), FinishReason.STOP, 0)
    group = Group({"prompt": "p"}, (rollout,), 0)
    step = [ScoredGroup(group, torch.zeros(1, 1), torch.ones(1), Logged({"x": ()}, {}))]  # a column without a value
    state: Any = SimpleNamespace(global_step=4, logging_steps=1)
    for _ in range(2):
        log.add([[ScoredGroup(group, torch.zeros(1, 1), torch.ones(1))], step], lambda group: ["a"], state)
        log.add_evaluation(step, lambda group: ["a"], state, "eval")
    assert len(said) == 1 and said[0].startswith("log_completions: some completions can't be logged (")


def test_a_torn_log_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, table: Any) -> None:
        raise FULL

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        write_log(tmp_path, [a_row(1)], ["r"], 1)
    assert not any((tmp_path / "completions").iterdir())


def test_a_console_that_cannot_print_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.StringIO):
        encoding = "ascii"

        def write(self, text: str) -> int:
            text.encode("ascii")
            raise FULL

    monkeypatch.setattr(sys, "stdout", Full())
    with caplog.at_level("INFO", logger="colograd"):
        Console(enabled=True, bars=False).say("caf\udce9")
    assert [record.getMessage() for record in caplog.records] == ["caf?"]


def test_a_tracker_that_fails_later_is_one_warning() -> None:
    said: list[str] = []
    tracker: Any = TensorBoardCallback(SimpleNamespace(add_scalar=lambda *args: 1 / 0, add_hparams=None))
    state, control = SimpleNamespace(global_step=1, is_world_process_zero=True), SimpleNamespace()
    handler, console = SimpleNamespace(callbacks=[tracker]), SimpleNamespace(warn=said.append)
    trainer = SimpleNamespace(console=console, callback_handler=handler)
    for _ in range(2):  # a second training of the same trainer
        spare_from_trackers(trainer)
        tracker.on_log(None, state, control, logs={"loss": 1.0})
    assert said == [
        "trackers: TensorBoardCallback doesn't take all that is sent (ZeroDivisionError: division by zero); said once"
    ]


def test_a_report_on_a_full_disk_is_no_bug(tmp_path: Path) -> None:
    def full() -> None:
        raise FULL

    said: list[str] = []
    recorder = object.__new__(Recorder)
    recorder.file = EventLog(tmp_path, said.append)
    recorder.trackers = SimpleNamespace(flush=full)  # type: ignore[assignment]
    for _ in range(2):
        recorder.on_log(None, None, None)
    assert len(said) == 1 and "No space left on device" in said[0] and "please report" not in said[0]

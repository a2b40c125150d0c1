"""Messages of a command until its run is ready."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

from colograd.reporting.console import Console
from colograd.runtime import waiting
from colograd.runtime.waiting import while_waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_stage_that_takes_long_has_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, stage = [""], [""]

    def shown(line: str) -> bool:
        said[0] += capsys.readouterr().out
        return line in said[0]

    monkeypatch.setattr(waiting, "EVERY", 0.01)
    monkeypatch.setattr(waiting, "LONG", 0.1)
    with while_waiting("loading", lambda: stage[0]):
        assert shown("loading\n")
        stage[0] = "the engine"
        until(lambda: shown("the engine (0 s since the start)\n"))
    assert said[0].count("\n") == 2
    with while_waiting("loading", lambda: "", shown=False):
        assert not capsys.readouterr().out


def test_in_a_terminal_a_line_turns_and_gives_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, stage = Terminal(), [""]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    with while_waiting("loading", lambda: stage[0]):
        until(lambda: "/ loading (0 s)" in terminal.getvalue())
        stage[0] = "the engine"
        until(lambda: "the engine (0 s)" in terminal.getvalue())
        Console(enabled=True, bars=True).say("engine: vLLM")
    assert capsys.readouterr().out == "engine: vLLM\n"
    assert not terminal.getvalue().rpartition("\r")[2].strip(), "nothing of it stays"

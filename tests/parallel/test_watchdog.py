"""A rank without progress ends all ranks. The error names the rank, its stage and its stack."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import pytest
import tiny
from needs import needs
from paths import SCRIPTS

from colograd.parallel import faults, watchdog
from colograd.parallel.watchdog import Watchdog

JUDGE = "reward function 'judge'"


@pytest.fixture(autouse=True)
def usual_limit() -> Iterator[None]:
    before = watchdog.limit()
    yield
    watchdog.set_limit(before)


# -- one rank, by a clock of the test's


class Ends(list[str]):
    """The reports of a watchdog. The test moves the clock."""

    def __init__(self) -> None:
        self.dog = Watchdog(self.append)
        self.dog.start = lambda: None  # type: ignore[method-assign]


def test_hang_is_reported_with_stage_and_stack(capfd: Any) -> None:
    watchdog.set_limit(10)
    ends = Ends()
    with ends.dog.inside("training"):
        watchdog.progress(JUDGE)
        for _ in range(11):
            ends.dog.look(1.0)
        assert not ends
        ends.dog.look(1.0)
    assert "made no progress for 11 s (rank_timeout) in reward function 'judge'" in ends[0]
    assert "test_hang_is_reported" in ends[0] and "test_hang_is_reported" in capfd.readouterr().err


def test_progress_waiting_and_rest_are_no_hanging() -> None:
    watchdog.set_limit(10)
    ends = Ends()

    class Work:
        def wait(self) -> None:
            for _ in range(30):
                ends.dog.look(1.0)

    with ends.dog.inside("training"):
        for _ in range(30):
            watchdog.progress()
            ends.dog.look(9.0)
        watchdog.finish(Work())  # type: ignore[arg-type]
        with ends.dog.inside("saving"):
            ends.dog.look(9.0)
        watchdog.set_limit(None)
        ends.dog.look(100.0)
    watchdog.set_limit(10)
    for _ in range(30):
        ends.dog.look(1.0)  # at a notebook's prompt
    assert not ends


def test_process_without_signs_of_life_is_missed() -> None:
    watchdog.set_limit(20)
    detector, told = object.__new__(faults.FailureDetector), []
    link = faults._Link(SimpleNamespace(sendall=lambda line: None), rank=3)  # type: ignore[arg-type]
    detector._links, detector._sending, detector._inside = [link], threading.Lock(), "training"
    detector._tell, detector._receive = told.append, lambda fault: None  # type: ignore[method-assign,assignment]
    for _ in range(2):
        detector._exchange_signs(15.0)
        link.silence, sign = 0.0, link.silence
        assert sign == 15.0 and not told
    for _ in range(4):
        detector._exchange_signs(15.0)
    assert [fault.text.partition(",")[0] for fault in told] == [
        "Rank 3 hasn't been heard of for 30 s (rank_timeout)"
    ], "the failure is reported once"


def test_stages_come_from_agreements_and_phases() -> None:
    from colograd.parallel.ranks import on_all_ranks
    from colograd.reporting.metrics import PhaseTimes

    with on_all_ranks("the search"):
        assert watchdog.stage() == "the search"
    with PhaseTimes().phase("publish"):
        assert watchdog.stage() == "publish"
    assert watchdog.stage() == "what follows publish"
    with faults.ends_together("saving"):
        assert watchdog.stage() == "saving"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank_timeout": 0}, "`rank_timeout` is 0, but must be above 0"),
        (
            {"rank_timeout": 60, "reward_timeout": 90},
            "reward_timeout is 90 .* raise rank_timeout above it, or lower",
        ),
        pytest.param(
            {"rank_timeout": 60, "tool_timeout": 60}, "tool_timeout is 60 and rank_timeout is 60", marks=needs("tools")
        ),
    ],
)
def test_rank_timeout_must_exceed_other_timeouts(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        tiny.config(tmp_path, **given)
    assert tiny.config(tmp_path, **given | {"rank_timeout": None}).rank_timeout is None


# -- ranks


def started(fault: str, limit: int, ranks: int = 2) -> contextlib.AbstractContextManager[list[launcher.Started]]:
    return launcher.apart(SCRIPTS / "hanging_ranks.py", fault, limit, ranks=ranks, env={"OMP_NUM_THREADS": "1"})


def ended(rank: launcher.Started) -> tuple[int, str]:
    """Return a rank's exit status and output."""
    done = rank.wait()
    return done.returncode, done.stdout + done.stderr


def is_stopped(rank: launcher.Started) -> bool:
    """Whether the process is stopped, that is waits for a SIGCONT. A process that has ended isn't stopped."""
    pid = rank.pid
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def wait_until_stopped(rank: launcher.Started) -> None:
    end = time.monotonic() + tiny.PATIENCE
    while not is_stopped(rank):
        assert time.monotonic() < end, f"it runs on: {rank.said()}"
        time.sleep(0.1)


def test_hanging_rank_ends_both_with_stage_and_stack() -> None:
    with started("sleeps", 6) as (waiting, hanging):
        status, said = ended(waiting)
        assert status == 1 and "Rank 1 made no progress for" in said and f"in {JUDGE}: it is in hang (" in said
        status, said = ended(hanging)
        assert status == 1 and "hanging_ranks.py" in said.partition("most recent call first")[2], "its stack"
        assert f"colograd: error: Rank 1 made no progress for 6 s (rank_timeout) in {JUDGE}" in said


@pytest.mark.slow  # an earlier test checks the reports
@pytest.mark.parametrize("fault", ["stops", "first"])
def test_stopped_process_is_missed_and_ends_when_continued(fault: str) -> None:
    with started(fault, 6) as ranks:
        stopped = ranks[0 if fault == "first" else 1]
        (waiting,) = set(ranks) - {stopped}
        named = f"Rank {ranks.index(stopped)} hasn't been heard of for"
        status, said = ended(waiting)
        assert status == 1 and named in said and f"last in {JUDGE}: its process is stopped" in said
        assert is_stopped(stopped)
        os.kill(stopped.pid, signal.SIGCONT)
        status, said = ended(stopped)
        assert status == 1 and named in said


@pytest.mark.slow
def test_briefly_stopped_process_continues() -> None:
    with started("stops", 40) as ranks:
        wait_until_stopped(ranks[1])
        time.sleep(4)  # no signs of life meanwhile
        os.kill(ranks[1].pid, signal.SIGCONT)
        assert [ended(rank)[0] for rank in ranks] == [0, 0]


@pytest.mark.slow  # it takes the same ways
def test_call_that_holds_the_gil_is_missed() -> None:
    with started("holds", 6) as (waiting, hanging):
        status, said = ended(waiting)
        assert status == 1 and f"last in {JUDGE}" in said
        end = time.monotonic() + tiny.PATIENCE
        while "in hang" not in hanging.said():
            assert time.monotonic() < end, hanging.said()
            time.sleep(0.1)


def test_the_only_rank_ends_too() -> None:
    with started("sleeps", 3, ranks=1) as (alone,):
        status, said = ended(alone)
    assert status == 1 and f"The only rank made no progress for 3 s (rank_timeout) in {JUDGE}" in said

"""A rank that fails or dies in the middle of an exchange ends all ranks, soon and with its message. No engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import launcher
import pytest
import tiny
from paths import SCRIPTS
from torch.distributed import TCPStore

from colograd.parallel import faults, ranks
from colograd.parallel.faults import ends_together
from colograd.parallel.layout import Place, check_places
from colograd.runtime import process

SCRIPT = SCRIPTS / "faulty_ranks.py"


def run(fault: str, ranks: int = 2, **variables: str) -> list[tuple[int, str]]:
    """Return each rank's exit status and output. Ranks start with ``variables`` set and with finished imports."""
    with launcher.apart(SCRIPT, fault, ranks=ranks, env={"OMP_NUM_THREADS": "1", **variables}) as started:
        done = [rank.wait() for rank in started]
    return [(rank.returncode, rank.stdout + rank.stderr) for rank in done]


def run_whole(fault: str, ranks: int = 2, **variables: str) -> list[tuple[int, str]]:
    """Like `run`, but each rank is a process from the first import to the interpreter's end."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **variables}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), fault],
            env=tiny.clean_environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    end = time.monotonic() + tiny.PATIENCE
    try:
        said = [rank.communicate(timeout=end - time.monotonic())[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(started, said, strict=True)]


def test_error_inside_a_collective_ends_every_rank() -> None:
    for status, said in run("raises", ranks=3)[:2]:
        assert status == 1 and "RankError: Rank 2 failed in training: ValueError: no room on the last rank" in said


def test_a_rank_that_was_killed_is_named() -> None:
    (status, said), (killed, _) = run("killed")
    assert killed == -signal.SIGKILL and status == 1
    assert "Rank 1 ended without a word: it was killed, ran out of memory" in said


def test_stuck_rank_is_ended_by_force() -> None:
    """A rank that waits as in a GPU's collective is ended by force."""
    (status, said), _ = run("stuck")
    assert status == 1 and said.startswith("colograd: error: Rank 1 ended without a word")
    assert "(rank 0 waited for it in training)" in said


def test_ranks_that_catch_the_same_error_continue() -> None:
    for status, said in run_whole("caught"):
        assert status == 0 and said.count("goes on after: ") == 2, said
        # Else a thread of gloo's may be left that drops the last exchange's tensor when there is no interpreter.
        assert "at its end: has parted" in said, said


def test_restarted_ranks_meet_in_torchruns_old_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's own process has it
    shared = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert [status for status, _ in run("killed", **shared, TORCHELASTIC_RESTART_COUNT="0")] == [1, -signal.SIGKILL]
    for status, said in run("caught", **shared, TORCHELASTIC_RESTART_COUNT="1"):
        assert status == 0 and said.count("goes on after: ") == 2, said


@pytest.mark.parametrize(("store", "attempt"), [("True", 2), ("False", 0), (None, 0)])
def test_restarts_count_only_in_a_store_that_outlives_them(
    monkeypatch: pytest.MonkeyPatch, store: str | None, attempt: int
) -> None:
    """A node that joins an elastic run counts restarts from 0 and still meets the other nodes."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if store is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", store)
    assert ranks.attempt() == attempt


@pytest.mark.slow  # they take the same ways
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("first", "Rank 0 ended without a word"),
        ("tells", "Rank 1 failed in a step: ValueError: no room"),
        ("early", "Rank 1 failed in training: ValueError: no room"),
        ("absent", "Timed out waiting 3000ms"),
    ],
)
def test_other_ways_to_fail_alone_end_all(fault: str, said: str) -> None:
    of_ranks = run(fault)
    waiting = of_ranks[1 if fault == "first" else 0]
    assert waiting[0] == 1 and said in waiting[1], waiting[1]
    assert of_ranks[0][0] and of_ranks[1][0]


@pytest.mark.slow
def test_a_rank_may_leave_while_another_still_writes() -> None:
    assert [status for status, _ in run("leaves", ranks=3)] == [0, 0, 0]


def test_a_signal_reaches_waiting_ranks() -> None:
    for status, said in run("stops", ranks=3):
        assert status == 0, said
        assert "told: SIGTERM, 30 s" in said, said


def test_one_rank_watches_nobody() -> None:
    @ends_together("training")
    def body() -> str:
        """Return a word."""
        return "done"

    assert body() == "done" and body.__doc__ == "Return a word." and faults._present is None
    faults.leave()


# -- places


def places(*of_nodes: tuple[str, int], devices: list[str] | None = None) -> list[Place]:
    found = [(host, local, count) for host, count in of_nodes for local in range(count)]
    return [Place(*place, (devices or [""] * len(found))[rank]) for rank, place in enumerate(found)]


def test_nodes_with_equal_rank_counts_are_accepted() -> None:
    check_places(places(("a", 2), ("b", 2), devices=["g0", "g1", "g2", "g3"]))
    check_places(places(("localhost", 1), ("localhost", 1)))  # containers may all be called alike


@pytest.mark.parametrize(
    ("started", "said"),
    [
        (places(("a", 3), ("b", 1)), r"different numbers of ranks \(LOCAL_WORLD_SIZE: 3 on a, 1 on b; total: 4\)"),
        ([Place("a", 0, 2), Place("b", 0, 2), Place("a", 1, 2), Place("b", 1, 2)], "Rank 1 is local rank 0 on b"),
        ([Place("a", 0, 2), Place("b", 1, 2)], r"Rank 1 is local rank 1 on b\. The 2 ranks of a node"),
        (places(("a", 2), devices=["g0", "g0"]), "Ranks 0 and 1 have the same GPU of a"),
    ],
)
def test_wrong_places_are_refused_with_launcher_values(started: list[Place], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_places(started)


def test_the_place_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    place = Place.here(torch.device("cpu"))
    assert (place.local_rank, place.ranks_per_node, place.device) == (1, 2, "") and place.host == os.uname().nodename

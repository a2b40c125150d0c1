"""Checkpoints are complete or absent."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from colograd.checkpoint import folders, manifest
from colograd.checkpoint.folders import ASIDE, complete_steps, discard, rotate, sweep
from colograd.checkpoint.search import find_resume
from colograd.checkpoint.stop_signal import StopSignal
from colograd.training.checkpointer import Checkpointer


def write(folder: Path, text: str = "weights") -> Path:
    """A folder as the Trainer writes it: files and a folder below."""
    (folder / "below").mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "below" / "model").write_text(text)
    return folder


def commit(aside: Path, final: Path) -> None:
    folders.commit(aside, final, {name: manifest.entry_of(aside / name) for name in manifest.files_of(aside)})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


# -- commit


def test_a_commit_moves_the_whole_folder(tmp_path: Path) -> None:
    aside, final = write(tmp_path / ASIDE / "checkpoint-3"), tmp_path / "checkpoint-3"
    commit(aside, final)
    assert (final / "below" / "model").read_text() == "weights" and not aside.exists()
    assert (tmp_path / ASIDE).parent == tmp_path  # the same file system: the rename is atomic


def test_manifest_and_names_are_flushed_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    rename = os.rename
    monkeypatch.setattr(folders, "flush", lambda path: events.append(f"flush {path.name}"))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(f"rename to {Path(b).name}"), rename(a, b)))
    commit(write(tmp_path / ASIDE / "checkpoint-3"), tmp_path / "checkpoint-3")
    assert set(events[:3]) == {"flush below", "flush checkpoint-3", "flush manifest.json"}
    assert events[3:] == ["rename to checkpoint-3", f"flush {tmp_path.name}"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    final = write(tmp_path / "checkpoint-3", "old")
    commit(write(tmp_path / ASIDE / "checkpoint-3", "new"), final)
    assert (final / "below" / "model").read_text() == "new" and names(tmp_path) == [".incomplete", "checkpoint-3"]


@pytest.mark.parametrize("crash", ["flush", "rename"])
def test_a_crash_before_the_rename_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError("power cut")

    write(tmp_path / "checkpoint-1")
    with monkeypatch.context() as patch:
        patch.setattr(*((folders, "flush") if crash == "flush" else (os, "rename")), fail)
        with pytest.raises(OSError, match="power cut"):
            commit(write(tmp_path / ASIDE / "checkpoint-2"), tmp_path / "checkpoint-2")
    assert find_resume("auto", str(tmp_path)) == str(tmp_path / "checkpoint-1")
    sweep(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]


# -- discard, sweep


def test_discarded_checkpoint_is_renamed_before_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "checkpoint-1")
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *args, **kwargs: None)  # killed while it deletes
    discard(folder)
    assert names(tmp_path) == [".discarded-checkpoint-1"] and find_resume("auto", str(tmp_path)) is None
    monkeypatch.undo()
    write(folder)
    discard(folder)  # the leftover is in nobody's way
    assert names(tmp_path) == []


def test_a_sweep_removes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    for name in (".incomplete/checkpoint-4", ".discarded-checkpoint-1", "checkpoint-2", ".mine"):
        write(tmp_path / name)
    (tmp_path / ".file").touch()
    sweep(tmp_path)
    assert names(tmp_path) == [".file", ".mine", "checkpoint-2"]
    sweep(tmp_path / "absent")


# -- rotate


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [2, 9, 10, 30]),
        (0, None, [2, 9, 10, 30]),
        (1, None, [30]),
        (3, None, [9, 10, 30]),  # by number, not by name
        (9, None, [2, 9, 10, 30]),
        (2, 2, [2, 30]),
        (3, 2, [2, 10, 30]),
        (1, 2, [2, 30]),  # the newest is needed to resume, the best is wanted
        (1, 30, [30]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(
    tmp_path: Path, limit: int | None, best: int | None, kept: list[int]
) -> None:
    for step in (10, 2, 30, 9):
        write(tmp_path / f"checkpoint-{step}")
    rotate(tmp_path, limit, None if best is None else str(tmp_path / f"checkpoint-{best}"))
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in kept)


def test_rotation_keeps_best_checkpoint_for_any_path_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path / f"checkpoint-{step}")
    monkeypatch.chdir(tmp_path)
    rotate(tmp_path, 2, "./checkpoint-1")
    assert {"checkpoint-1", "checkpoint-4"} <= set(names(tmp_path))
    rotate(tmp_path, 1, "./checkpoint-4")
    assert names(tmp_path) == ["checkpoint-4"]


def test_rotation_deletes_later_steps_first(tmp_path: Path) -> None:
    """The run has gone back to step 2. It may be killed before it reaches step 9 again."""
    for step in (2, 9, 10, 4):
        write(tmp_path / f"checkpoint-{step}")
    rotate(tmp_path, 1, None, newest=4)
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_damaged_one_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path / f"checkpoint-{step}")
    rotate(tmp_path, 2, None, newest=8, damaged={6})
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


# -- find_resume


@pytest.mark.parametrize("wanted", [None, False, "false", "None", ""])
def test_nothing_wanted_is_a_fresh_start(tmp_path: Path, wanted: str | bool | None) -> None:
    write(tmp_path / "checkpoint-1")
    assert find_resume(wanted, str(tmp_path)) is None


@pytest.mark.parametrize("wanted", [True, "true", "True", "auto"])
def test_the_last_complete_checkpoint_is_found(tmp_path: Path, wanted: str | bool) -> None:
    for name in ("checkpoint-9", "checkpoint-10", ".incomplete/checkpoint-11", ".discarded-checkpoint-12"):
        write(tmp_path / name)
    assert find_resume(wanted, str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / "elsewhere" / "checkpoint-5")
    assert find_resume(str(folder), "unused") == str(folder)


def test_auto_starts_anew_where_there_is_none(tmp_path: Path) -> None:
    assert find_resume("auto", str(tmp_path)) is None is find_resume("auto", str(tmp_path / "absent"))


def test_search_finds_last_checkpoint_that_all_nodes_have(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path / f"checkpoint-{step}")
    assert complete_steps(str(tmp_path)) == [2, 4, 6]
    assert find_resume("auto", str(tmp_path), [[2, 4, 6], [2, 4]]) == str(tmp_path / "checkpoint-4")
    assert find_resume("auto", str(tmp_path), [[2, 4, 6], []]) is None
    with pytest.raises(
        ValueError, match=r"no complete checkpoint that all 2 nodes have \(steps per node: \[\[6\], \[4\]\]\)"
    ):
        find_resume(True, str(tmp_path), [[6], [4]])


def test_search_skips_damaged_checkpoints_and_never_starts_anew(tmp_path: Path) -> None:
    for step in (2, 4):
        write(tmp_path / f"checkpoint-{step}")
    assert find_resume("auto", str(tmp_path), damaged={4}) == str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=r"is auto, but all checkpoints are damaged \(.*, steps 2, 4\)\. Restore"):
        find_resume("auto", str(tmp_path), damaged={4, 2})


@pytest.mark.parametrize("missing", ["empty", "absent"])
def test_true_wants_a_checkpoint(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"true` needs a checkpoint, but '.*{missing}' holds no complete checkpoint"):
        find_resume(True, str(tmp_path / missing))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"isn't a complete checkpoint \(trainer_state.json is missing\)\. Set `resume"
    ):
        find_resume(str(tmp_path), "unused")


# -- signals


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    stop = StopSignal()
    stop.install()
    signal.raise_signal(signal.SIGINT)
    assert stop.received == "Ctrl-C"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_is_noticed_and_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    stop.install()
    assert not stop.received
    signal.raise_signal(signal.SIGTERM)
    assert stop.received
    stop.remove()
    assert signal.getsignal(signal.SIGTERM) is before
    stop.remove()  # twice does no harm


@pytest.mark.parametrize("ranks", [1, 2])
def test_failing_rank_ignores_sigterm_until_it_has_reported(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends SIGTERM to the other ranks as soon as one rank is dead."""
    monkeypatch.setattr("colograd.training.checkpointer.world_size", lambda: ranks)
    # An earlier test's trainer may have left its handler.
    earlier, checkpointer = signal.signal(signal.SIGTERM, signal.SIG_DFL), Checkpointer.__new__(Checkpointer)
    checkpointer.stop_signal, checkpointer.finish_alone = StopSignal(), lambda: None  # type: ignore[method-assign]
    checkpointer.trainer = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(RuntimeError), checkpointer.during_training():
        raise RuntimeError("rank 0 is gone")
    try:
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (ranks == 1)
        checkpointer.stop_signal.remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    thread = threading.Thread(target=stop.install)
    thread.start()
    thread.join()
    stop.remove()
    assert signal.getsignal(signal.SIGTERM) is before

"""A run's folder on a mounted bucket: the run works there, or one error at start names the missing capability."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.checkpoint.folders import check_file_system

HELPER = Path(__file__).parents[1] / "helpers" / "bucket.py"


def test_ordinary_folder_passes_and_stays_empty(tmp_path: Path) -> None:
    check_file_system(tmp_path / "run")
    assert not any((tmp_path / "run").iterdir())


def test_folder_without_renames_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ValueError, match=r"output_dir is '.*run', where folders can't be made or renamed \(Function"):
        check_file_system(tmp_path / "run")
    assert not any((tmp_path / "run").iterdir())


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Fixture: a function that mounts a bucket of the given kind."""
    interpreter = os.environ.get("COLOGRAD_FUSE_PYTHON", sys.executable)
    if interpreter == sys.executable and importlib.util.find_spec("mfusepy") is None:
        pytest.skip("needs `pip install mfusepy`, or COLOGRAD_FUSE_PYTHON with it, and libfuse")
    if not shutil.which("fusermount") or not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse and fusermount")
    started: list[subprocess.Popen[bytes]] = []
    places: list[Path] = []

    def mounted(kind: str) -> Path:
        folder, place = tmp_path / f"{kind}-objects", tmp_path / kind
        folder.mkdir()
        place.mkdir()
        started.append(subprocess.Popen([interpreter, str(HELPER), kind, str(folder), str(place)]))
        places.append(place)
        until = time.monotonic() + 60
        while not os.path.ismount(place):
            if started[-1].poll() is not None or time.monotonic() > until:
                pytest.skip("FUSE file systems can't be mounted here")
            time.sleep(0.1)
        return place

    yield mounted
    for place, process in zip(places, started, strict=True):
        subprocess.run(["fusermount", "-u", "-z", str(place)], capture_output=True)
        process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "missing"), [("objects", "made or renamed"), ("prefixes", "made or renamed")])
def test_buckets_without_folder_renames_are_refused(mount: Callable[[str], Path], kind: str, missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        check_file_system(mount(kind) / "run")


@pytest.mark.slow
@pytest.mark.engine
def test_run_on_a_cached_bucket_saves_and_resumes(
    mount: Callable[[str], Path], tiny_model: Path, closing: Any, tmp_path: Path
) -> None:
    def train(folder: Path, steps: int) -> torch.Tensor:
        args = tiny.config(
            folder, max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=2,
            lr_scheduler_type="constant", **tiny.ONE_BY_ONE,
        )  # fmt: skip
        trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, args, tiny.prompts()))
        trainer.train(resume_from_checkpoint="auto")
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()

    run = mount("cached") / "run"
    train(run, 2)
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert torch.equal(train(run, 4), train(tmp_path / "local", 4))
    assert (run / "report.html").is_file()

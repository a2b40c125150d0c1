"""Runs of scripts/overlapping_ranks.py, and their results."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import launcher
import tiny
import torch
from paths import SCRIPTS

from colograd.extensions.overlap.rounds import FILE as PARTITION
from colograd.rollout.record_file import FIGURES

STEPS = 3
# Otherwise the last bits of MKL's products depend on a matrix's address.
EXACT = tiny.clean_environment() | {"MKL_CBWR": "COMPATIBLE"}


def start(model: Path, folder: Path, mode: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return launcher.run(SCRIPTS / "overlapping_ranks.py", model, folder, mode, ranks=ranks, env=EXACT)


def results(folder: Path, mode: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{mode}-rank?.json"))]


def weights(folder: Path, run: str) -> dict[str, torch.Tensor]:
    """Read the weights at a run's end, and check that all ranks have the same."""
    first, *others = (torch.load(path) for path in sorted(folder.glob(f"{run}-rank?.pt")))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    return first


def is_replayed(result: dict[str, Any]) -> bool:
    return f"replay: {STEPS} of {STEPS} step(s) came out bit for bit as recorded" in result["replayed"]["lines"]


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    def norm(values: list[torch.Tensor]) -> float:
        return float(torch.cat([value.double().flatten() for value in values]).norm())

    return norm([mine[name] - theirs[name] for name in mine]) / norm([*theirs.values()])


def check_resumed(model: Path, folder: Path, mode: str, ranks: int = 2) -> None:
    """Check that a killed run resumes before a trained step and before an untrained one, and that a replay has its
    bits."""
    run = folder / "overlapped"
    shutil.rmtree(run / "checkpoint-2", ignore_errors=True)  # perhaps incomplete, because the next step writes it
    done = start(model, folder, mode, ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    second = run / "_journal" / "step-00000001"
    first_time, again = (second / FIGURES).read_text().splitlines()
    assert first_time == again and len((second / PARTITION).read_text().splitlines()) == 1
    assert is_replayed(results(folder, "resume")[0])

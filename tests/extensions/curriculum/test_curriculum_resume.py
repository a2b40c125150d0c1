"""A run with a curriculum resumes bit for bit, on one rank and on two, and is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launcher
import pytest
from paths import SCRIPTS

pytestmark = pytest.mark.engine


def runs(model: Path, folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """Run once, and again from the middle. Returns for each rank the complete run and the resumed half."""
    done = launcher.run(SCRIPTS / "curriculum_ranks.py", model, folder, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    size = max(ranks, 1)
    return [json.loads((folder / f"rank{rank}-of-{size}.json").read_text()) for rank in range(size)]


def resumed_alike(found: list[list[dict[str, Any]]]) -> None:
    for whole, resumed in found:
        second = [row for row in whole["drawn"] if row[0] >= 3 * 2]
        assert resumed["drawn"] == second and len(second) == 6 // len(found)
        assert resumed["tokens"] == [row for row in whole["tokens"] if row[0] >= 3 * 2]
        assert (resumed["weights"], resumed["record"]) == (whole["weights"], whole["record"])
    assert len({json.dumps(run["record"]) for rank in found for run in rank}) == 1, "all ranks have one record"
    assert any(found[0][0]["resting"]), "some prompt was solved, and rested"


@pytest.mark.slow  # test_curriculum.py loads a record and goes on
def test_a_run_with_a_curriculum_resumes_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    found = runs(tiny_model, tmp_path, 0)
    resumed_alike(found)
    rows = [prompt for _, prompt in found[0][0]["drawn"]]
    assert len(rows) == 12 and len(set(rows)) < 12, "in six steps of eight prompts some come again"


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    """Two ranks begin with the prompts of one."""
    of_two, of_one = tmp_path / "two", tmp_path / "one"
    of_two.mkdir()
    of_one.mkdir()
    two, one = runs(tiny_model, of_two, 2), runs(tiny_model, of_one, 0)
    resumed_alike(two)
    drawn = sorted(row for rank in two for row in rank[0]["drawn"])
    assert drawn[:4] == one[0][0]["drawn"][:4], "two rounds, as later ones follow their own gradients' last bits"

"""`make records`: its page is fresh, and each row's tiny form runs on a CPU and reports that."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from paths import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import random_model
import records
import training_path


def test_the_page_is_what_would_be_written() -> None:
    assert (ROOT / "docs" / "measurements.md").read_text() == records.page(records.read_measured())


def test_every_row_has_source_and_valid_command() -> None:
    assert len({record.name for record in records.RECORDS}) == len(records.RECORDS)
    for record in records.RECORDS:
        assert record.source.startswith("https://") and record.shape in random_model.SHAPES
        for on_cpu in (False, True):
            for script, *arguments in record.commands("M", on_cpu):
                if Path(script).stem == "training_path":
                    training_path.parse(arguments)
                else:
                    assert Path(script).stem == "side_by_side"


@pytest.mark.slow
@pytest.mark.engine
def test_a_tiny_form_of_every_row_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "records.py"), "--device", "cpu", "--out", str(tmp_path)]
    before = (ROOT / "docs" / "measurements.md").read_text()
    done = subprocess.run(command, env=tiny.clean_environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "on a CPU, tiny sizes" in done.stdout.splitlines()[0]
    rows = json.loads((tmp_path / "records.json").read_text())["rows"]
    assert set(rows) == {record.name for record in records.RECORDS} and all("ours" in row for row in rows.values())
    assert re.search(r"prime-rl 0.6B: [\d,]+ tokens/s, [\d.]+ GiB \| published: 11.9k tokens/s", done.stdout)
    assert (ROOT / "docs" / "measurements.md").read_text() == before, "figures of a CPU aren't written into the page"

"""Commands of the Makefile that no other test runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from paths import ROOT


def test_compiling_packages_prints_no_warnings(tmp_path: Path) -> None:
    """Other packages' invalid escapes can't be fixed here, so their warnings are hidden."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "theirs.py").write_text('PATTERN = "\\d"\n')
    (line,) = re.findall(r"^\t(.*-m compileall .*); \\$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = line.replace("$(PY)", sys.executable).replace("$(VENV)", str(tmp_path))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    assert [*(tmp_path / "lib" / "__pycache__").glob("theirs.*.pyc")]

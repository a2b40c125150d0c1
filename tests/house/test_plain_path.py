"""The way of one prompt through a plain run stays short, and free of options."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT
from tiny import PATIENCE

MOST = {"frames": 64, "files": 23, "lines": 4_500}
MOST_OPTION_LINES = 0.024  # share of these files' lines


@pytest.mark.engine
def test_plain_path_is_short_and_names_no_option() -> None:
    script = ROOT / "tests" / "scripts" / "plain_path.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    last = done.stdout.strip().splitlines()[-1]
    frames, files, lines, share = (float(word.strip("%,")) for word in last.split() if word[0].isdigit())
    assert all(value <= most for value, most in zip((frames, files, lines), MOST.values(), strict=True)), last
    assert share / 100 <= MOST_OPTION_LINES, last

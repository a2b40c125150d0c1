"""The way of one prompt through a plain run stays short, and free of options."""

from __future__ import annotations

import launcher
import pytest
from paths import SCRIPTS

MOST = {"frames": 60, "files": 24, "lines": 4500}
MOST_OPTION_LINES = 0.03  # share of these files' lines


@pytest.mark.engine
def test_plain_path_is_short_and_names_no_option() -> None:
    done = launcher.run(SCRIPTS / "plain_path.py")
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    frames, files, lines, share = (float(word.strip("%,")) for word in last.split() if word[0].isdigit())
    assert all(value <= most for value, most in zip((frames, files, lines), MOST.values(), strict=True)), last
    assert share / 100 <= MOST_OPTION_LINES, last

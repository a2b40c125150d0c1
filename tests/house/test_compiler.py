"""`make setup` names a missing compiler before it installs anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


def check(path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "requirements/compiler.py"]
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(path), **more}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_missing_compiler_is_named_first(tmp_path: Path) -> None:
    said = check(tmp_path)
    assert said.returncode == 1 and said.stderr.startswith("setup: a C compiler (cc)") and "gcc" in said.stderr
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["cc", "clang", "own"])
def test_any_compiler_will_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch(0o755)
    said = check(tmp_path, CC="own -O2")
    assert "C compiler" not in said.stderr

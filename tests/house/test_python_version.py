"""The oldest Python that setup.cfg names runs the package."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import launcher
import pytest
import tiny
from paths import ROOT

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
OLDEST = SETUP["options"]["python_requires"].removeprefix(">=")
# Import every module, without optional packages. One module is left out: it needs a notebook's IPython.
IMPORT_ALL = """
import importlib, pkgutil, colograd
for module in pkgutil.walk_packages(colograd.__path__, "colograd."):
    if module.name != "colograd.extensions.recording.notebook":
        importlib.import_module(module.name)
print(len([name for name in __import__("sys").modules if name.startswith("colograd")]))
"""
COMPILE_ALL = "import compileall, sys; sys.exit(not compileall.compile_dir(sys.argv[1], quiet=1, force=True))"


def test_all_settings_name_the_same_oldest_version() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    named = [line.split(" :: ")[-1] for line in SETUP["metadata"]["classifiers"].split("\n") if ":: 3." in line]
    assert named[0] == OLDEST == tools["mypy"]["python_version"]
    assert tools["ruff"]["target-version"] == f"py{OLDEST.replace('.', '')}"


def test_the_oldest_version_imports_every_module(tmp_path: Path) -> None:
    """If the oldest Python version isn't this one, its packages may be missing. Then the sources are only compiled."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}" == OLDEST
    python = sys.executable if here else shutil.which(f"python{OLDEST}")
    if python is None:
        pytest.skip(f"there is no Python {OLDEST}")
    if here:
        (tmp_path / "import_all.py").write_text(IMPORT_ALL)
        done = launcher.run(tmp_path / "import_all.py")
    else:
        sources = tmp_path / "colograd"
        shutil.copytree(ROOT / "colograd", sources, ignore=shutil.ignore_patterns("__pycache__"))
        command = [python, "-c", COMPILE_ALL, str(sources)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=tiny.PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    if here:
        assert int(done.stdout) > 100

"""Any extension can be deleted: the rest imports, trains and passes the core's tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from tiny import PATIENCE, clean_environment

from colograd.extensions import EXTENSIONS

COPIED = ("colograd", "tests", "recipes", "docs", "requirements")
FILES = ("setup.cfg", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md")
RUN = """
import importlib, pathlib, pkgutil, sys
import colograd, tiny
assert pathlib.Path(colograd.__file__).is_relative_to(sys.argv[1]), colograd.__file__
from colograd.runtime import registry
left_out = ["extensions.recording.notebook"]  # which needs IPython
if "recording" not in registry.installed():  # readers of what that extension writes: these commands end with one line
    left_out += ["apps.report", "apps.show"]
for module in pkgutil.walk_packages(colograd.__path__, "colograd."):
    if not module.name.removeprefix("colograd.").startswith(tuple(left_out)):
        importlib.import_module(module.name)
from colograd import GRPOTrainer
folder = pathlib.Path(sys.argv[1]) / "run"
trainer = GRPOTrainer(
    model=str(tiny.make_model(folder / "model")), reward_funcs=tiny.vowels, args=tiny.config(folder, max_steps=2),
    train_dataset=tiny.prompts(8),
)
trainer.train()
assert len(trainer.state.log_history) >= 2
"""


def torn_down(folder: Path, *extensions: str) -> Path:
    """Copy the repository without the given extensions and their tests."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for name in extensions:
        place = folder / "colograd" / "extensions" / name
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
        shutil.rmtree(folder / "tests" / "extensions" / name, ignore_errors=True)
    return folder


def run(folder: Path, *command: str, patience: float = PATIENCE) -> str:
    """Run Python in the copy, with its package first on the path, and return its output."""
    path = os.pathsep.join([str(folder), str(folder / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=clean_environment() | {"PYTHONPATH": path}, timeout=patience,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.engine
def test_core_trains_without_any_extension(tmp_path: Path) -> None:
    folder = torn_down(tmp_path, *EXTENSIONS)
    run(folder, "-c", RUN, str(folder))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_core_trains_without_one_extension(extension: str, tmp_path: Path) -> None:
    folder = torn_down(tmp_path, extension)
    run(folder, "-c", RUN, str(folder))


CORE_TESTS = ("config", "data", "losses", "memory", "parallel", "policy", "rewards", "rollout", "runtime", "sharding",
              "training", "usercode", "weights", "checkpoint", "engine", "reporting")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(12 * PATIENCE)
@pytest.mark.parametrize("gone", [(name,) for name in EXTENSIONS] + [EXTENSIONS], ids=lambda gone: "+".join(gone))
def test_core_passes_its_tests_without(gone: tuple[str, ...], tmp_path: Path) -> None:
    """Tests that ask for a missing extension are skipped (`needs`). Without all of them the engine's tests run too."""
    folder = torn_down(tmp_path, *gone)
    rooms = [f"tests/{room}" for room in CORE_TESTS]
    marks = "not slow and not gpu" + ("" if gone == EXTENSIONS else " and not engine")
    command = ("-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", *rooms)
    said = run(folder, *command, patience=12 * PATIENCE)
    passed, *skipped = (int(number) for number in re.findall(r"(\d+) (?:passed|skipped)", said)[-2:])
    assert sum(skipped) < passed / 5, "a part of the core needs an extension"

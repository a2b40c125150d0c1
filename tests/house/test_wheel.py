"""The source archive, and the wheel that pip builds from it, installed outside the clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tiny
from paths import MODEL, RECIPES, ROOT

from colograd import __version__

PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-deps", "--no-index")
SOURCES = ("colograd", "recipes", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def run(*words: str | Path, cwd: Path) -> str:
    environment = tiny.clean_environment() | {"PYTHONPATH": ""}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=tiny.PATIENCE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive and the wheel. They are built from a copy, because a build writes into the clone."""
    clone, built = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, clone / name)
    run(sys.executable, "-c", f"from setuptools import build_meta as b; b.build_sdist({str(built)!r})", cwd=clone)
    (source,) = built.glob("*.tar.gz")
    run(sys.executable, *PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", built, source, cwd=built)
    (wheel,) = built.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def installed(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. Other packages come from this process's environment, so nothing is downloaded."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, *PIP[2:], "install", *OFFLINE, archives[1], cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind the wheel on the path
    return home / "bin"


def test_archives_hold_every_recipe(archives: tuple[Path, Path]) -> None:
    files = {path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*") if path.is_file()}
    with tarfile.open(archives[0]) as source, zipfile.ZipFile(archives[1]) as wheel:
        assert files and {f"colograd-{__version__}/recipes/{name}" for name in files} <= set(source.getnames())
        assert {f"colograd/recipes/{name}" for name in files} <= set(wheel.namelist())


def test_wheel_installs_its_own_version(installed: Path, tmp_path: Path) -> None:
    code = "import colograd, importlib.metadata as m; print(colograd.__file__, m.version('colograd'))"
    path, version = run(installed / "python", "-c", code, cwd=tmp_path).split()
    assert Path(path).is_relative_to(installed.parent) and version == __version__


def test_installed_command_copies_recipes(installed: Path, tmp_path: Path) -> None:
    assert "  grpo_qwen  " in run(installed / "colograd", "recipes", cwd=tmp_path)
    run(installed / "colograd", "recipes", "--to", "mine", cwd=tmp_path)
    copies = {path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert copies == {path.relative_to(RECIPES) for path in RECIPES.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.engine
def test_installed_quickstart_trains_two_steps(installed: Path, tmp_path: Path) -> None:
    run(installed / "python", "-m", "colograd.apps.quickstart.quickstart", cwd=tmp_path)
    flags = ("--config", "grpo_smollm2_cpu", "--max_steps", "2", "--save_strategy", "no", "--output_dir", "run")
    output = run(installed / "colograd", "train", *flags, cwd=tmp_path)
    assert "step 2/2" in output and "which comes with Colograd" in output
    assert (tmp_path / "run" / "model.safetensors").stat().st_size == (MODEL / "model.safetensors").stat().st_size
    assert (tmp_path / "run" / "recipe.yaml").read_text() == (RECIPES / "grpo_smollm2_cpu.yaml").read_text()

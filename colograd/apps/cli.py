"""The command line program ``colograd``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..runtime import registry
from ..runtime.shipped import FOLDER, near_names, shipped_folder

# Command -> (its arguments, its help, its function). The function is imported only when the command runs.
COMMANDS = {
    "init": ("[FOLDER]", "write a first recipe and reward function, by questions or flags", ".init:main"),
    "recipes": ("[NAME ...] [--to FOLDER]", "list the recipes that come with Colograd, or copy some", ".cli:recipes"),
    "train": ("--config recipes/X.yaml [--any_flag value]", "train by a recipe", "..train:main"),
    "doctor": ("[--config recipes/X.yaml [--any_flag value]]", "check a recipe, or the installation", ".doctor:main"),
    "plan": ("--config recipes/X.yaml | --model M [--gpus N --gpu-memory GIB]", "show what fits GPUs", ".plan:main"),
    "eval": ("MODEL | CHECKPOINT | RUN --tasks gsm8k ifeval ...", "take tasks of lm-evaluation-harness", ".eval:main"),
    "export": ("CHECKPOINT FOLDER [--push REPO]", "write its model as a folder, an adapter merged", ".export:main"),
    "replay": ("RUN --step N [--to M] [--profile]", "train recorded steps again, without an engine", ".replay:main"),
    "show": ("RUN [--step N] [--worst] [--grep TEXT]", "print a step's completions, or search all steps", ".show:main"),
    "report": ("RUN [RUN2 ...] [--out report.html]", "write a run's page, or several runs'", ".report.page:report"),
    "watch": ("RUN [--port 8765]", "show the page of a run in progress, live", ".report.serving:watch"),
    "version": ("", "print the version", ""),
}  # fmt: skip
TRAINERS = ("train", "doctor", "replay", "eval")  # These commands print errors of bad input themselves.

READERS = ("show", "report", "watch")  # These commands read files that the extension `recording` writes.

WIDTH = 90


def main(argv: Sequence[str] | None = None) -> int:
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    command = "version" if command == "--version" else command
    if command in ("", "-h", "--help"):
        uses = [(f"{name} {arguments}".strip(), does) for name, (arguments, does, _) in COMMANDS.items()]
        width = max(len(use) for use, _ in uses)
        lines = [f"  {use:<{width}}   {does}" for use, does in uses]
        print("usage: colograd COMMAND ...\n", *lines, sep="\n", file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f" Did you mean `colograd {near[0]}`?" if near else ""
        known = f"There are {', '.join(COMMANDS)}; `colograd --help` says more."
        print(f"colograd: {command!r} is no command.{meant} {known}", file=sys.stderr)
        return 2
    if command == "version":
        from .. import __version__

        print(__version__)
        return 0
    module, _, name = COMMANDS[command][2].partition(":")
    try:
        if command in READERS:
            registry.require("recording", f"colograd {command}", "use another command")
        return int(getattr(importlib.import_module(module, __package__), name)(rest))
    except (ValueError, OSError) as error:
        if command in TRAINERS:
            raise
        print(f"colograd {command}: error: {error}", file=sys.stderr)
        return 2


def recipes(argv: Sequence[str] | None = None) -> int:
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
    # Recipes come first, because they are in no subfolder.
    files = sorted(paths, key=lambda path: (len(path.parts), path))
    if not options.names and options.to is None:
        names = {path: str(path.with_suffix("") if path.parent == Path() else path) for path in files}
        width = max(map(len, names.values()))
        for path, name in names.items():
            # A file's purpose is the first sentence of the comment at its beginning.
            text = (root / path).read_text(encoding="utf-8").removeprefix("#!/bin/bash\n").replace("{#-", "#")
            head = itertools.takewhile(str.strip, (line.strip("# ") for line in text.splitlines()))
            purpose = textwrap.shorten(" ".join(head).split(". ")[0].rstrip("."), WIDTH, placeholder=" ...")
            print(f"  {name:<{width}}   {purpose}".rstrip())
        print("\n`colograd train --config NAME` runs a recipe; `colograd recipes NAME` copies it, `--to FOLDER` all.")
        return 0
    selected = [] if options.names else files
    for name in options.names:  # A recipe's name may lack `recipes/` and `.yaml`. A folder's name means its files.
        short = name.removeprefix(f"{FOLDER}/").rstrip("/")
        same = [path for path in files if short in (str(path), f"{path.parent}", str(path.with_suffix("")))]
        if not same:
            raise ValueError(
                f"{name!r} isn't a shipped file: name one, e.g. {near_names(Path(name))} (see `colograd recipes`)."
            )
        selected += same
    contents = {(options.to or Path(FOLDER)) / path: (root / path).read_bytes() for path in dict.fromkeys(selected)}
    for path, content in contents.items():
        if path.exists() and not (path.is_file() and path.read_bytes() == content):
            raise ValueError(f"{path} differs from the shipped file, and is kept: choose another --to FOLDER.")
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    print(f"wrote {', '.join(map(str, contents))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command line program ``colograd``. The first argument names a command; the command parses the other arguments."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from ..runtime import registry

# For each command: its arguments, its help, and its function, which is imported only when the command runs.
COMMANDS = {
    "init": ("[FOLDER]", "write a first recipe and reward function, by questions or flags", ".init:main"),
    "recipes": ("[NAME ...] [--to FOLDER]", "list the recipes that come with Colograd, or copy some", ".recipes:main"),
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
# Commands that print errors of bad input themselves. Errors during their training keep a traceback.
TRAINERS = ("train", "doctor", "replay", "eval")
READERS = ("show", "report", "watch")  # Commands that read files of the extension `recording`.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names (default: `sys.argv`). Return the exit status."""
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


if __name__ == "__main__":
    sys.exit(main())

"""The console script ``colograd``: one word, then that command's own arguments."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

# Each command's arguments, what it does, and the module whose ``main(argv)`` does it: imported when it is asked for.
COMMANDS = {
    "init": ("[FOLDER]", "write a first recipe and reward function, by questions or flags", ".init"),
    "train": ("--config recipes/X.yaml [--any_flag value]", "train by a recipe", "..train"),
    "doctor": ("--config recipes/X.yaml [--any_flag value]", "check a recipe on this machine", ".doctor"),
    "plan": ("--config recipes/X.yaml | --model M [--gpus N --gpu-memory GIB]", "say what fits such GPUs", ".plan"),
    "export": ("CHECKPOINT FOLDER", "write its model as an ordinary folder, an adapter merged", ".export"),
    "replay": ("RUN --step N [--to M] [--profile]", "train recorded steps again, without an engine", ".replay"),
    "show": ("RUN [--step N] [--worst] [--grep TEXT]", "print a step's completions", ".show"),
    "report": ("RUN [RUN2 ...] [--out report.html]", "write a run's page, or one of several runs", ".report"),
    "watch": ("RUN [--port 8765]", "show the page of a run in progress, live", ".watch"),
    "version": ("", "print the version", ""),
}  # fmt: skip
TRAINERS = ("train", "doctor", "replay")  # print bad input themselves: an error while they train keeps its traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    command = "version" if command == "--version" else command
    if command in ("", "-h", "--help"):
        print(usage(), end="", file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    if command not in COMMANDS:
        print(unknown(command), file=sys.stderr)
        return 2
    if command == "version":
        from .. import __version__

        print(__version__)
        return 0
    module = importlib.import_module(COMMANDS[command][2], __package__)
    if command in TRAINERS:
        return int(module.main(rest))
    try:
        return int(module.main(rest))
    except (ValueError, OSError) as error:
        print(f"colograd {command}: error: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    """What the command line can do, a line each."""
    lines = [(f"{name} {arguments}".strip(), does) for name, (arguments, does, _) in COMMANDS.items()]
    width = max(len(line) for line, _ in lines)
    return "usage: colograd COMMAND ...\n\n" + "".join(f"  {line:<{width}}   {does}\n" for line, does in lines)


def unknown(command: str) -> str:
    """A line on a command that there isn't, with the one that was probably meant."""
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    meant = f" Did you mean `colograd {near[0]}`?" if near else ""
    return f"colograd: {command!r} is no command.{meant} There are {', '.join(COMMANDS)}; `colograd --help` says more."


if __name__ == "__main__":
    sys.exit(main())

"""The console script ``colograd``: one word, then that command's own arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: colograd COMMAND ...

  train --config recipes/X.yaml [--any_flag value]    train by a recipe
  doctor --config recipes/X.yaml [--any_flag value]   check a recipe on this machine, without training
  plan --model M --gpus N --gpu-memory GIB            say what fits such GPUs, in each way of sharding
  export CHECKPOINT FOLDER                            write its model as an ordinary folder, an adapter merged
  show RUN [--step N]                                 print a step's completions
  report RUN [RUN2 ...] [--out report.html]           write one HTML page of a run, or of several side by side
  watch RUN [--port 8765]                             show the same page live, for a run in progress
  version                                             print the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "train":
        from ..train import main as train

        return train(rest)
    if command == "doctor":
        from .doctor import main as doctor

        return doctor(rest)
    if command == "plan":
        from .plan import main as plan

        return plan(rest)
    if command == "export":
        from .export import main as export

        return export(rest)
    if command == "show":
        from .show import main as show

        return show(rest)
    if command == "report":
        from .report import main as report

        return report(rest)
    if command == "watch":
        from .watch import main as watch

        return watch(rest)
    if command in ("version", "--version"):
        from .. import __version__

        print(__version__)
        return 0
    asked = command in ("-h", "--help")
    print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())

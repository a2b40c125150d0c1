"""``colograd report RUN [RUN2 ...]``: one HTML file that shows a run, or several side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..report.page import NAME, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; the exit status."""
    parser = argparse.ArgumentParser(
        prog="colograd report",
        description="One self-contained HTML file that shows what a run did, or several runs side by side.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir")
    parser.add_argument("--out", type=Path, help=f"the file; default {NAME} in the first run's folder")
    options = parser.parse_args(argv)
    path = write_report(*options.runs, out=options.out)
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0

"""``colograd report RUN [RUN2 ...]`` writes a run's page; ``colograd watch RUN`` serves it live."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .report.page import NAME, write_report
from .report.serving import Server

PORT = 8765


def report(argv: Sequence[str] | None = None) -> int:
    """Write the page. Return the exit status."""
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


def watch(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="colograd watch",
        description="The page of a run, live. It reads the run's folder, and writes nothing.",
    )
    add = parser.add_argument
    add("run", type=Path, help="the run's output_dir; it needn't be there yet")
    add("--port", type=int, default=PORT, help=f"default {PORT}; 0 takes a free one")
    host = "address to listen at, default 127.0.0.1; there is no password: whoever reaches another can read the run"
    add("--host", default="127.0.0.1", help=host)
    options = parser.parse_args(argv)
    if options.run.exists() and not options.run.is_dir():
        raise ValueError(f"{options.run} is a file: give the run's output_dir.")
    try:
        server = Server(options.run, options.host, options.port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"can't listen at {options.host}:{options.port} ({error}): try --port 0.") from error
    where = f"[{options.host}]" if ":" in options.host else options.host
    print(f"http://{where}:{server.server_port}/  shows {options.run}; Ctrl-C ends it", flush=True)
    if not options.run.exists():
        print(f"{options.run} isn't there yet: the page waits for it", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0

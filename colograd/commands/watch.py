"""``colograd watch RUN``: the run's page, live, on this machine or for a mounted folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..report.serving import Server

PORT = 8765


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C; the exit status."""
    parser = argparse.ArgumentParser(
        prog="colograd watch",
        description="The page of a run, live. It reads the run's folder, and writes nothing.",
    )
    parser.add_argument("run", type=Path, help="the run's output_dir; it needn't be there yet")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0 takes a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at, default 127.0.0.1; there is no password: whoever reaches another can read the run",
    )
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

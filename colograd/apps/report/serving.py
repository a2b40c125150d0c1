"""The live page of a run: an HTTP server that only reads the run's files."""

from __future__ import annotations

import argparse
import gzip
import ipaddress
import re
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ... import __version__
from .page import compact, document, of_step, overview
from .recorded_run import RecordedRun

STEP_JSON_BYTES = 8_000_000
PORT = 8765
HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip
LOOK_SECONDS = 1.0  # The server reads the run's files at most once in this time, however many pages are open.

REQUEST_SECONDS = 20  # A connection that sends nothing for so long is closed.

_ADDRESS = re.compile(r"/data\?after=([0-9]{1,15})|/step\?step=([0-9]{1,15})")


def watch(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="colograd watch", description="The page of a run, live. It reads the run's folder, and writes nothing."
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
        raise ValueError(
            f"can't listen at {options.host}:{options.port} ({error}): choose another --port (0: a free one) or --host."
        ) from error
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


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: str | Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.run = host, RecordedRun(folder)
        self._lock, self._looked = threading.Lock(), -LOOK_SECONDS
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    def data(self, after: int) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                self.run.refresh()
                self._looked = time.monotonic()
            if 0 < after == self.run.change:
                return {"change": after}
            return overview(self.run)

    def step(self, step: int) -> dict[str, Any]:
        with self._lock:
            return of_step(self.run, step, STEP_JSON_BYTES)

    def server_bind(self) -> None:
        # HTTPServer.server_bind would look up the host's full name, which may contact a name server.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback: a browser may close the connection before the server has sent its response."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "colograd", ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        if not host_is_ours(self.headers.get("Host"), self.server.host):
            why = "This host isn't served here: open the address that colograd watch printed."
            return self._refuse(HTTPStatus.FORBIDDEN, why)
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return self._refuse(HTTPStatus.FORBIDDEN, "Pages of other sites may not read this page's data.")
        if self.path == "/":
            data = {"live": True, "version": __version__, "runs": [self.server.data(0)]}
            self._answer(document(data, connect="'self'"), "text/html; charset=utf-8")
        elif (asked := _ADDRESS.fullmatch(self.path)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is /, /data?after=N and /step?step=N.")
        else:
            content = self.server.data(int(asked[1])) if asked[1] else self.server.step(int(asked[2]))
            self._answer(compact(content), "application/json")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(why + "\n", "text/plain; charset=utf-8", status)

    def _answer(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = text.encode()
        self.send_response(status)
        if len(body) > 4096 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: an open page sends a request every few seconds."""


def host_is_ours(host: str | None, served: str) -> bool:
    """Return whether a request's Host header is localhost, ``served``, or an IP address that this server may have.

    By DNS rebinding a script of another website can reach this server. The Host header then names that website.
    """
    try:
        name = urlsplit(f"//{(host or '').strip()}").hostname or ""
        if name in ("localhost", served.lower()):
            return True
        return ipaddress.ip_address(name).is_loopback or not re.fullmatch(r"localhost|::1|127\..*", served)
    except ValueError:
        return False

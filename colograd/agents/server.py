"""An HTTP server on loopback, in a thread, for the length of a generation."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

STOP_SECONDS = 10.0  # that an open connection may hold up the end
KEEP_ALIVE_SECONDS = 600  # of a connection that isn't used: a program may run a tool for long between two requests


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application; yields its address, such as ``http://127.0.0.1:41234``.

    Raises:
        RuntimeError: it doesn't start.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1, ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="colograd-endpoint", daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.005)
            if not thread.is_alive():
                raise RuntimeError("the agents' endpoint didn't start: see the error above.")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(STOP_SECONDS)

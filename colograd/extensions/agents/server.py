"""An HTTP server on loopback, which runs in a thread during a generation."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

GRACE_SECONDS = 1.0  # seconds to finish sending answers at the end
STOP_SECONDS = 10.0  # maximum seconds to wait for the server's thread to end
KEEP_ALIVE_SECONDS = 600  # seconds to keep an idle connection: a tool may run for long between two requests


class _Server(uvicorn.Server):
    """A uvicorn server that ends at once.

    uvicorn's own server checks for its end every 0.1 s, and waits for its connections in steps of 0.1 s. That is too
    long for a short generation.
    """

    async def main_loop(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        await self.on_tick(0)  # sets the default headers of all answers
        if not self.should_exit:
            await self._ending.wait()

    def end(self) -> None:
        """End the server. Any thread may call this once the server has started."""
        self.should_exit = True
        with contextlib.suppress(RuntimeError, AttributeError):  # the loop is closed, or `main_loop` hasn't begun
            self._loop.call_soon_threadsafe(self._ending.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        until = time.monotonic() + GRACE_SECONDS
        while (state.connections or state.tasks) and time.monotonic() < until:
            await asyncio.sleep(0.002)
        for task in list(state.tasks):
            task.cancel()


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application. Yield its address, such as ``http://127.0.0.1:41234``.

    Raises:
        RuntimeError: the server doesn't start.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, lifespan="off", ws="none", date_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )  # fmt: skip
        server = _Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="colograd-endpoint", daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.005)
            if not thread.is_alive():
                raise RuntimeError("the agents' endpoint didn't start: see the error above.")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.end()
            thread.join(STOP_SECONDS)

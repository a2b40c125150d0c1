"""An HTTP server on loopback, in a thread, for the length of a generation."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

GRACE_SECONDS = 1.0  # for answers that are being sent at the end
STOP_SECONDS = 10.0  # that the server's thread may hold up the end
KEEP_ALIVE_SECONDS = 600  # of a connection that isn't used: a program may run a tool for long between two requests


class _Server(uvicorn.Server):
    """Ends when it is told: uvicorn's own looks every 0.1 s, and waits as long for its connections, which is a part of
    a short generation."""

    async def main_loop(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        await self.on_tick(0)  # the headers of all answers
        if not self.should_exit:
            await self._ending.wait()

    def end(self) -> None:
        """Any thread may call it, once the server has started."""
        self.should_exit = True
        with contextlib.suppress(RuntimeError, AttributeError):  # its loop is closed, or hasn't begun to wait
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
    """Serve an ASGI application; yields its address, such as ``http://127.0.0.1:41234``.

    Raises:
        RuntimeError: it doesn't start.
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

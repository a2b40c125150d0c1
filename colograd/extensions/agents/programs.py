"""A program of the user's that runs while the engine decodes: a function in its own thread, or a command."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from ...usercode.calls import Outcome, raised_outcome
from ...usercode.untrusted import parse_json

STARTER = Path(__file__).with_name("command_process.py")
MOST_OUTPUT = 2**20  # bytes kept of a command's output
SHOWN = 2000  # characters of the output in an error


class Program(Protocol):
    """A running program."""

    future: Future[Outcome]  # the program's outcome; only its own end completes it

    def stop(self) -> None:
        """End the program if possible, without waiting for its end."""


class FunctionProgram:
    """A sync or async function in its own thread, so that a function that blocks delays nobody else.

    An async function has its own event loop, and `stop` cancels it there. A sync function can't be ended.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.future: Future[Outcome] = Future()
        self._function, self._arguments = function, dict(arguments)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        threading.Thread(target=self._run, name="colograd-agent", daemon=True).start()

    def stop(self) -> None:
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            value = self._function(**self._arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(self._awaited(value))
            outcome = Outcome("value", value, time.perf_counter() - started)
        except BaseException as error:  # SystemExit too: it would end the thread, and its session wait for ever
            outcome = raised_outcome(error)
        self.future.set_result(outcome)

    async def _awaited(self, value: Any) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await value


class CommandProgram:
    """A command in a new process. `stop` kills it with all processes of its group. It dies with the trainer.

    The command reads ``given`` (JSON) from its standard input. The last line that it prints is its value, if that line
    is JSON.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], given: Any) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"the command {command[0]!r} is no program: install it, or correct agent.")
        self.future: Future[Outcome] = Future()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(STARTER), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._given = json.dumps(given, default=str).encode()
        threading.Thread(target=self._run, name="colograd-agent", daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _run(self) -> None:
        started, process = time.perf_counter(), self._process
        assert process.stdin is not None and process.stdout is not None
        threading.Thread(target=self._feed, daemon=True).start()
        threading.Thread(target=self._reap, daemon=True).start()
        kept = b""
        while part := os.read(process.stdout.fileno(), 2**16):  # endless output must not fill the memory
            kept = (kept + part)[-MOST_OUTPUT:]
        status = process.wait()
        process.stdout.close()
        seconds, printed = time.perf_counter() - started, kept.decode(errors="replace")
        if status:
            self.future.set_result(Outcome("died", (status, printed[-SHOWN:]), seconds))
            return
        lines = printed.strip().splitlines()
        try:
            value = parse_json(lines[-1]) if lines else None
        except ValueError:
            value = None
        self.future.set_result(Outcome("value", value, seconds))

    def _reap(self) -> None:
        """Wait for the command's end, then end the processes that it left behind. They may keep its output open."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # WNOWAIT: its process id isn't reused yet
            self.stop()

    def _feed(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended, or closed its input
            self._process.stdin.write(self._given)
            self._process.stdin.close()

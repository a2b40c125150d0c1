"""Runs of a user's agent program while the engine decodes: a function in a thread, or a command in a process."""

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
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ...usercode.calls import Outcome, raised_outcome
from ...usercode.untrusted import parse_json

# Code of a new Python process, which becomes the agent's command and on Linux dies with the trainer. It isn't run as a
# `preexec_fn` (between fork and exec), because Python code there could deadlock in a process with threads.
STARTER = """
import contextlib, ctypes, os, signal, sys
with contextlib.suppress(OSError, AttributeError):  # not on Linux
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and commands would inherit that
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error.strerror}")
"""
MOST_OUTPUT = 2**20  # Maximum bytes of the end of a command's output, which is kept in memory.
SHOWN = 2000  # Maximum characters of a command's output in an error.


class FunctionProgram:
    """Runs a sync or async agent function in its own thread, so that a blocking function delays no other session. An
    async function has its own event loop, and `stop` cancels the function. A sync function can't be stopped."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.future: Future[Outcome] = Future()  # Completed by the function's end, not by `stop`.
        self._function, self._arguments = function, dict(arguments)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        threading.Thread(target=self._run, name="colograd-agent", daemon=True).start()

    def stop(self) -> None:
        """Cancel an async function, without waiting for its end. A sync function goes on."""
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # Raised if the function's event loop is already closed.
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        started = time.perf_counter()

        async def awaited(value: Any) -> Any:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            return await value

        try:
            value = self._function(**self._arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(awaited(value))
            outcome = Outcome("value", value, time.perf_counter() - started)
        except BaseException as error:  # SystemExit would end only this thread, and the session would wait.
            outcome = raised_outcome(error)
        self.future.set_result(outcome)


class CommandProgram:
    """Runs an agent command in a new process, which on Linux dies with the trainer. `stop` kills its process group. The
    command reads ``given`` (JSON) from its standard input. Its value is its last line of output if that is JSON, or
    None. A command that ends with another status than 0 has failed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], given: Any) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"the command {command[0]!r} isn't found on PATH: install it, or correct agent.")
        self.future: Future[Outcome] = Future()
        with tempfile.TemporaryFile() as row:  # A file, because a pipe blocks if the command doesn't read it.
            row.write(json.dumps(given, default=str).encode())
            row.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", STARTER, *command], stdin=row, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._run, name="colograd-agent", daemon=True).start()
        threading.Thread(target=self._reap, daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _run(self) -> None:
        started, process, output = time.perf_counter(), self._process, b""
        assert process.stdout is not None
        while part := os.read(process.stdout.fileno(), 2**16):  # Keep only the end, because output may be endless.
            output = (output + part)[-MOST_OUTPUT:]
        status = process.wait()
        process.stdout.close()
        seconds, printed = time.perf_counter() - started, output.decode(errors="replace")
        value = None
        with contextlib.suppress(ValueError, IndexError):  # The last line isn't JSON, or there is no output.
            value = parse_json(printed.strip().splitlines()[-1])
        died = Outcome("died", (status, printed[-SHOWN:]), seconds)
        self.future.set_result(died if status else Outcome("value", value, seconds))

    def _reap(self) -> None:
        """Wait for the command's end, then kill its process group: processes left in it may keep the output open."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # WNOWAIT keeps its id reserved.
            self.stop()

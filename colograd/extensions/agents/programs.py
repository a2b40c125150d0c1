"""Run a user's agent program while the engine decodes: a function in a thread, or a command in a process."""

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

# A new Python process runs this code, and then becomes the command. Popen's `preexec_fn` could deadlock with threads.
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
MOST_OUTPUT = 2**20  # Number of last bytes of a command's output that are kept in memory.
SHOWN = 2000  # Number of last characters of a command's output that an error shows.


class FunctionProgram:
    """Runs an agent's function in a thread of its own, so that a blocking function delays no other session."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.future: Future[Outcome] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        thread = threading.Thread(target=self._run, args=(function, arguments), name="colograd-agent", daemon=True)
        thread.start()

    def stop(self) -> None:
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # The function's event loop is closed.
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        started = time.perf_counter()

        async def awaited(value: Any) -> Any:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            return await value

        try:
            value = function(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(awaited(value))
            outcome = Outcome("value", value, time.perf_counter() - started)
        except BaseException as error:  # Also SystemExit, which would end this thread without an outcome.
            outcome = raised_outcome(error)
        self.future.set_result(outcome)


class CommandProgram:
    """Runs an agent's command, which gets a dataset row as JSON on stdin.

    If the command succeeds, the outcome's value is its last printed line, parsed as JSON. None if it isn't JSON."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], row: Any) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"the command {command[0]!r} isn't found on PATH: install it, or change `agent`.")
        self.future: Future[Outcome] = Future()
        with tempfile.TemporaryFile() as file:  # A pipe would block the writer if the command didn't read.
            file.write(json.dumps(row, default=str).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", STARTER, *command], stdin=file, stdout=subprocess.PIPE,
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
        while part := os.read(process.stdout.fileno(), 2**16):
            output = (output + part)[-MOST_OUTPUT:]
        status = process.wait()
        process.stdout.close()
        seconds, printed = time.perf_counter() - started, output.decode(errors="replace")
        value = None
        with contextlib.suppress(ValueError, IndexError):
            value = parse_json(printed.strip().splitlines()[-1])
        died = Outcome("died", (status, printed[-SHOWN:]), seconds)
        self.future.set_result(died if status else Outcome("value", value, seconds))

    def _reap(self) -> None:
        """When the command has ended, kill the other processes of its process group.

        Otherwise a process may keep the output open, and `_run` waits for the output's end."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # WNOWAIT keeps the process id taken.
            self.stop()

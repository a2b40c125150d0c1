"""Runs a Python program that a model wrote, in a new interpreter that can be killed. A worker process calls this.

The program gets none of the trainer's environment variables, an empty folder to write into, and limits of time, memory
and file size. The program passes if it reaches its last line. An earlier exit with status 0 is a failure. The limits
contain bugs, but don't protect against an attacker, because the program has the user's rights and the network.

This module imports nothing from Colograd, because workers import it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

MEMORY = 4 * 2**30  # maximum bytes of a program's address space
FILE_BYTES = 16 * 2**20
ENDED_BY_SCHEDULER = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGUSR2)  # Exit statuses, see `stop_signals`.
SHOWN = 2000  # Maximum characters of standard error in `Ended.problem`.


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of running a program."""

    passed: bool  # Whether the program reached its last line.
    problem: str = ""  # Reason of a failure: `late`, or the end of the program's standard error.


def run_python(program: str, seconds: float, memory: int = MEMORY) -> Ended:
    """Run a Python program. Kill the program with all processes of its group if it runs longer than ``seconds``."""
    reader, writer = os.pipe()
    token = secrets.token_hex(16)
    try:
        with tempfile.TemporaryDirectory(prefix="colograd-code-", ignore_cleanup_errors=True) as folder:
            path, errors = os.path.join(folder, "program.py"), os.path.join(folder, "stderr")
            with open(path, "w", encoding="utf-8", errors="replace") as file:
                file.write(f"{program}\nimport os as _os\n_os.write({writer}, b'{token}')\n")
            with open(errors, "wb") as stderr:
                status = _run(path, folder, stderr.fileno(), writer, seconds, memory)
                if status in ENDED_BY_SCHEDULER:  # run it once more, because the job still judges its last answers
                    status = _run(path, folder, stderr.fileno(), writer, seconds, memory)
            os.close(writer)
            writer = -1
            os.set_blocking(reader, False)  # a process outside the group may hold the pipe open, so don't wait
            with contextlib.suppress(BlockingIOError):
                if os.read(reader, 64).decode("ascii", "replace") == token:
                    return Ended(True)
            if status is None:
                return Ended(False, "late")
            with open(errors, encoding="utf-8", errors="replace") as stderr:
                return Ended(False, stderr.read()[-SHOWN:].strip() or "it ended before its tests")
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _run(path: str, folder: str, stderr: int, writer: int, seconds: float, memory: int) -> int | None:
    """Run a Python file. Return its exit status, or None if it was killed after ``seconds``."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        cwd=folder,
        env={"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=[writer],
        start_new_session=True,
        preexec_fn=lambda: _limit(seconds, memory),
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _limit(seconds: float, memory: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(seconds) + 1),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    with contextlib.suppress(OSError, AttributeError):  # The call exists only on Linux.
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the program dies with the worker.

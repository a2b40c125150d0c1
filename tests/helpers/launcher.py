"""Starts ranks and other programs of tests as forks of a process that has done the imports.

Importing torch, transformers and vLLM takes 15 of 17 processor seconds of a test's program, and a fork milliseconds.
Each rank is a process with its own engine, as with `torchrun`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import launching
import numpy
import tiny
from paths import HELPERS, SCRIPTS

from colograd.runtime import process
from colograd.runtime import registry as extension_registry

# Modules that a run imports, at once or on first use. None may start a thread: a fork has one thread only.
PRELOADED = (
    "colograd.trainer",
    "colograd.training.assembly",
    "colograd.apps.cli",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.layers.quantization.online",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "compressed_tensors",
    "deepspeed",  # which transformers' Trainer imports where it is there
    "peft",
    "tiny",
)


def run(
    program: str | Path,
    *arguments: Any,
    ranks: int = 0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = tiny.PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` with all its ranks, as `subprocess.run` would run `python program` or `torchrun program`.

    Args:
        program: a script's path, or a module's name.
        ranks: number of ranks with torchrun's variables; 0: one process without these variables.
        env: the environment; None: `tiny.clean_environment()`.
        timeout: seconds.

    Returns:
        The output of all ranks, and a status. If one of several ranks fails, the others get a SIGTERM.

    Raises:
        subprocess.TimeoutExpired: after ``timeout``. All ranks are killed.
    """
    with Started(program, arguments, variables_of(ranks) or [{}], env, cwd) as started:
        return started.wait(timeout)


@contextlib.contextmanager
def apart(
    program: str | Path, *arguments: Any, ranks: int = 2, env: Mapping[str, str] | None = None
) -> Iterator[list[Started]]:
    """Start ranks that write and end separately. ``env`` wins over torchrun's variables. At the end all are killed."""
    with contextlib.ExitStack() as open_ones:
        yield [
            open_ones.enter_context(Started(program, arguments, [of_rank | dict(env or {})]))
            for of_rank in variables_of(ranks)
        ]


class Started:
    """Processes that write into the same two files. They are killed when the context ends."""

    def __init__(
        self,
        program: str | Path,
        arguments: Sequence[Any],
        of_each: Sequence[Mapping[str, str]],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        environment = dict(tiny.clean_environment() if env is None else env)
        self.argv = [str(program), *map(str, arguments)]
        request = {
            "argv": self.argv,
            "cwd": str(cwd or Path.cwd()),
            "environments": [environment | dict(own) for own in of_each],
        }
        self._open = contextlib.ExitStack()
        files = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._files = [self._open.enter_context(file).fileno() for file in files]
        self._line = self._open.enter_context(socket.socket(socket.AF_UNIX))
        self._line.connect(_server())
        socket.send_fds(self._line, [json.dumps(request).encode() + b"\n"], self._files)
        self._answers = self._open.enter_context(self._line.makefile())
        self._leader = int(self._answers.readline())
        self._ended: int | None = None

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._ended is None:
            self.kill()
        self._open.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._leader, signal.SIGKILL)

    @property
    def pid(self) -> int:
        """Process id of the only process. Raises an AssertionError with its output if it has ended."""
        children = Path(f"/proc/{self._leader}/task/{self._leader}/children")
        # The leader sends the status as soon as the process has ended: then there is something to read.
        while not select.select([self._line], [], [], 0)[0]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if pids := children.read_text().split():
                    (pid,) = pids
                    return int(pid)
            time.sleep(0.01)
        raise AssertionError(f"{' '.join(self.argv)} has ended, and wrote: {self.said()[-3000:]}")

    def said(self) -> str:
        return "".join(map(_read, self._files))

    def wait(self, timeout: float = tiny.PATIENCE) -> subprocess.CompletedProcess[str]:
        self._line.settimeout(timeout)
        try:
            self._ended = int(self._answers.readline() or -signal.SIGKILL)
        except TimeoutError:
            self.kill()
            raise subprocess.TimeoutExpired(self.argv, timeout, *map(_read, self._files)) from None
        return subprocess.CompletedProcess(self.argv, self._ended, *map(_read, self._files))


def variables_of(ranks: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets, for each rank."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.free_port()), "TORCHELASTIC_RUN_ID": "tests"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(ranks)]


def on_two_ranks(model: Path, folder: Path, sharding: str) -> list[str]:
    """Return the digest of each rank's last weights."""
    # Otherwise the last bits of MKL's products depend on a matrix's address.
    exact = tiny.clean_environment() | {"MKL_CBWR": "COMPATIBLE"}
    arguments = (model, folder / "run", folder, "float32", "", sharding)
    done = run(SCRIPTS / "two_ranks.py", *map(str, arguments), ranks=2, env=exact)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((folder / f"rank{rank}-of-2.json").read_text()) for rank in range(2)]
    assert all(step["differing"] == [] for rank in ranks for step in rank["seen"])
    return [rank["seen"][-1]["weights"] for rank in ranks]


def _read(file: int) -> str:
    """Read a file without moving the position at which others write."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


@functools.cache
def _server() -> str:
    """Return the address of the server: pytest-xdist's controller started one for all workers (`launching`)."""
    address = os.environ.get(launching.ADDRESS) or launching.start()
    end = time.monotonic() + tiny.PATIENCE
    while not Path(address).exists():  # the server binds it after its imports
        assert time.monotonic() < end, "the launcher of tests didn't start"
        time.sleep(0.05)
    return address


def preload() -> None:
    """Import the modules of a run, and switch off two slow parts of its start."""
    for name in PRELOADED:
        importlib.import_module(name)
    # vLLM looks at each family's class, which it loads a moment later, in a process that imports all of vLLM again.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    # How many products the device could have done meanwhile: one is multiplied, not as many as 0.2 s take.
    if extension_registry.hooks_of("recording", "recorder"):
        importlib.import_module("colograd.extensions.recording.utilisation").SECONDS = 0.0  # type: ignore[attr-defined]


def serve(address: str) -> None:
    """Fork a leader for each request, until the parent process is gone."""
    _end_with_parent()
    process.quiet_logs(verbose=False)
    sys.path.insert(0, str(HELPERS))
    preload()
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork copies every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait for leaders
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{address}.new")
        door.listen()
        os.rename(f"{address}.new", address)  # so that a test connects only to a server that listens
        while True:
            line, _ = door.accept()
            with line:
                text, files, _, _ = socket.recv_fds(line, 1 << 20, 2)
                if os.fork() == 0:
                    door.close()
                    lead(line, json.loads(text), files)
                for file in files:
                    os.close(file)


def lead(line: socket.socket, request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Fork the ranks, wait for them, and report how they ended."""
    _end_with_parent()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line.sendall(f"{os.getpid()}\n".encode())
    waiting: set[int] = set()
    for environment in request["environments"]:
        if (pid := os.fork()) == 0:
            line.close()
            become(request["argv"], environment, request["cwd"], files)
        waiting.add(pid)
    alone, failed = len(request["environments"]) == 1, 0
    while waiting:
        pid, raw = os.wait()
        waiting.remove(pid)
        if raw and not failed:
            failed = os.waitstatus_to_exitcode(raw)
            for other in waiting:
                os.kill(other, signal.SIGTERM)
    line.sendall(f"{failed if alone else int(failed != 0)}\n".encode())
    os._exit(0)


def become(argv: list[str], environment: dict[str, str], folder: str, files: Sequence[int]) -> NoReturn:
    """Continue as `python argv...`."""
    _end_with_parent()
    status: Any = 1
    try:
        for file, number in zip(files, (1, 2), strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        random.seed()
        numpy.random.seed()
        process.prepare_threads()
        sys.argv[:] = argv
        if argv[0].endswith(".py"):
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
        else:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 255)


def _end_with_parent() -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, from sys/prctl.h
    ctypes.CDLL("libc.so.6").prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])

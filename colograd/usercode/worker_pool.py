"""Worker processes that call reward functions and tools while vLLM decodes. They can be killed at a time limit.

cloudpickle sends importable functions by name, and functions of a script or notebook by value. Workers ignore Ctrl-C
and schedulers' signals (`STOPS`), which all processes of a job get."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from .calls import Outcome, raised_outcome
from .worker_process import STOPS

WORKER = Path(__file__).with_name("worker_process.py")
START_SECONDS = 600.0
STOP_SECONDS = 5.0
LOOK_SECONDS = 0.1
DROP_SECONDS = 1.0  # Seconds that a cancelled call may hold up other calls. Then its worker is killed.


class WorkerCall(Future[Outcome]):
    """A queued or running call. ``state``: (key, pickled trainer state), sent if the worker's state has another key."""

    def __init__(self, index: int, keywords: dict[str, Any], state: tuple[Any, bytes] | None) -> None:
        super().__init__()
        self.index, self.keywords, self.state = index, keywords, state
        self.unneeded_since = math.inf

    def cancel(self) -> bool:
        """Cancel a call that hasn't begun, and return True. Otherwise return False.

        A running call goes on. Its worker is killed after `DROP_SECONDS`, as soon as other calls wait."""
        cancelled = super().cancel()
        if not cancelled:
            self.unneeded_since = time.monotonic()
        return cancelled


class CannotTravel(ValueError):
    """Raised if a worker can't load functions. ``args[0]`` has an error or None per function."""


class Worker:
    def __init__(self, functions: Sequence[bytes]) -> None:
        self._functions = list(functions)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._state_key: Any = None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, str(WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
                    start_new_session=True,  # Signals to the trainer's process group don't reach user code.
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._connection = connection = Connection(ours.detach())
        self._state_key = None
        paths = [os.getcwd() if path == "" else path for path in sys.path]
        connection.send_bytes(pickle.dumps((paths, self._functions)))
        problems = ["no answer"] * len(self._functions)
        try:
            if connection.poll(START_SECONDS):
                problems = pickle.loads(connection.recv_bytes())
        except EOFError:
            problems = [f"the worker ended with status {self.stop(5.0)} while loading it"] * len(self._functions)
        if any(problems):
            self.stop()
            raise CannotTravel(problems)

    def run(self, call: WorkerCall, timeout: float | None, is_idle: Callable[[], bool]) -> Outcome:
        """Run a call and wait for its outcome. Kill the worker if the call exceeds ``timeout``.

        Also kill the worker `DROP_SECONDS` after the call is cancelled, if other calls wait (``not is_idle()``)."""
        if self._connection is None:
            self.start()
        assert self._connection is not None and self._process is not None
        key, state = call.state or (self._state_key, None)
        if key == self._state_key:
            state = None
        message = pickle.dumps((call.index, state, call.keywords, call.state is not None))
        started, limit = time.monotonic(), math.inf if timeout is None else timeout
        try:
            self._connection.send_bytes(message)
            while not self._connection.poll(max(min(started + limit - time.monotonic(), LOOK_SECONDS), 0.0)):
                seconds = time.monotonic() - started
                is_unneeded = time.monotonic() - call.unneeded_since >= DROP_SECONDS and not is_idle()
                if seconds >= limit or is_unneeded:
                    self.stop()
                    return Outcome("late", None, limit) if seconds >= limit else Outcome("dropped", None, seconds)
            outcome = Outcome(*pickle.loads(self._connection.recv_bytes()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return Outcome("died", self.stop(5.0), 0.0)
        self._state_key = key
        return outcome

    def stop(self, patience: float = 0.0) -> int | None:
        """Let the worker exit within ``patience`` seconds, then kill its process group. Return the exit status."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


@dataclass(eq=False)
class WorkerPool:
    """Worker processes that share a queue of calls. Each worker has a daemon thread that sends it calls."""

    what: str
    functions: Mapping[str, Callable[..., Any]]
    size: int  # Number of workers. 0: no function runs in a worker.
    timeout: float | None

    def __post_init__(self) -> None:
        able, reasons = dict[str, bytes](), dict[str, str]()
        self.reasons = reasons  # Name of a function that can't run in a worker -> why.
        for name, function in self.functions.items() if self.size else ():
            try:
                able[name] = cloudpickle.dumps(function)
            except Exception as error:
                reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        trial = Worker(list(able.values()))
        try:
            if able:
                trial.start()
        except CannotTravel as error:
            reasons |= {name: problem for name, problem in zip(able, error.args[0], strict=True) if problem}
            able = {name: pickled for name, pickled in able.items() if name not in reasons}
        finally:
            trial.stop()
        self.notes = [f"{self.what}: {', '.join(able)} in {self.size} worker process(es)"] if able else []
        self.notes += [f"{self.what}: {name} runs in the trainer's process ({why})" for name, why in reasons.items()]
        self._indices = {name: index for index, name in enumerate(able)}
        self._queue: queue.SimpleQueue[WorkerCall | None] = queue.SimpleQueue()
        self._workers = [Worker(list(able.values())) for _ in range(self.size if able else 0)]
        self._threads = [threading.Thread(target=self._serve, args=[w], daemon=True) for w in self._workers]
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: str) -> bool:
        return name in self._indices

    def submit(self, name: str, keywords: dict[str, Any], state: tuple[Any, bytes] | None = None) -> WorkerCall:
        """Queue a call. If a worker can't start or arguments can't be pickled, the outcome's kind is ``raised``."""
        call = WorkerCall(self._indices[name], keywords, state)
        self._queue.put(call)
        return call

    def _serve(self, worker: Worker) -> None:
        while (call := self._queue.get()) is not None:
            if not call.set_running_or_notify_cancel():
                continue
            try:
                outcome = worker.run(call, self.timeout, self._queue.empty)
            except BaseException as error:
                outcome = raised_outcome(error)
            call.keywords = {}
            call.set_result(outcome)
        worker.stop()  # `close` may have run while the worker was starting.

    def close(self) -> None:
        self._indices = {}
        with contextlib.suppress(queue.Empty):
            while (call := self._queue.get_nowait()) is not None:
                call.cancel()
        for _ in self._threads:
            self._queue.put(None)
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)  # A worker that is still starting ends with its thread or this process.

"""Worker processes: they call reward functions and tools while the engine decodes, and can be killed.

cloudpickle sends importable functions by name, and functions of a script or a notebook by value. A call that exceeds
its time limit is killed with its process and the programs that it started. A process that is killed or dies is
replaced. Workers ignore Ctrl-C and the signals of `stop_signals`, because terminals and schedulers send these to every
process of a job. Workers die with the trainer.
"""

from __future__ import annotations

import contextlib
import functools
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from .calls import Outcome, raised_outcome
from .worker_process import STOPS

WORKER = Path(__file__).with_name("worker_process.py")
START_SECONDS = 600.0  # maximum seconds for a worker to import its functions, on a busy machine
STOP_SECONDS = 5.0  # maximum seconds to wait for each thread of a pool to end
LOOK_SECONDS = 0.1  # seconds between two checks whether a running call is still needed
DROP_SECONDS = 1.0  # seconds for an unneeded call to end by itself: a new process takes as long


class WorkerCall(Future[Outcome]):
    """A call that is queued or runs in a worker.

    Args:
        index: index of the function in the worker.
        state: for a reward function, a key and the pickled trainer state. It is sent if the process has another key.
    """

    def __init__(self, index: int, keywords: dict[str, Any], state: tuple[Any, bytes] | None) -> None:
        super().__init__()
        self.index, self.keywords, self.state = index, keywords, state
        self.unneeded_since: float | None = None  # time.monotonic() when `cancel` was called

    def cancel(self) -> bool:
        """Drop the call from the queue. If it runs, its worker is replaced when another call needs the worker."""
        cancelled = super().cancel()
        if not cancelled:
            self.unneeded_since = time.monotonic()
        return cancelled


class CannotTravel(ValueError):
    """The error of a function that can't be sent to another process."""


def travelling(functions: Mapping[str, Callable[..., Any]]) -> tuple[dict[str, bytes], dict[str, CannotTravel]]:
    """Return pickles of the functions that can run in a worker, and the reasons why the others can't, by name."""
    able: dict[str, bytes] = {}
    reasons: dict[str, CannotTravel] = {}
    for name, function in functions.items():
        try:
            able[name] = cloudpickle.dumps(function)
        except Exception as error:  # pickling the objects that it holds may raise anything
            reasons[name] = CannotTravel(f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        Worker(list(able.values())).try_loading()
    except CannotTravel:  # try each function alone; a start takes as long as its imports
        for name, pickled in list(able.items()):
            try:
                Worker([pickled]).try_loading()
            except CannotTravel as reason:
                del able[name]
                reasons[name] = reason
    return able, reasons


class Worker:
    """One worker process. The first call starts it, and the next call after its end starts it again."""

    def __init__(self, functions: Sequence[bytes]) -> None:
        self._functions = list(functions)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._state_key: Any = None  # key of the trainer state that the process has

    def start(self) -> None:
        """Start the process and let it load the functions."""
        ours, theirs = socket.socketpair()
        with theirs:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # the worker inherits the mask
            try:
                self._process = subprocess.Popen(
                    [sys.executable, str(WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
                    start_new_session=True,  # signals to the trainer's group don't reach the user's programs
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._connection = connection = Connection(ours.detach())
        self._state_key = None
        paths = [os.getcwd() if path == "" else path for path in sys.path]
        connection.send_bytes(pickle.dumps((paths, self._functions)))
        try:
            problem = pickle.loads(connection.recv_bytes()) if connection.poll(START_SECONDS) else "no answer"
        except EOFError:
            problem = f"the worker ended with status {self._exit_status()} while loading it"
        if problem is not None:
            self.stop()
            raise CannotTravel(problem)

    def try_loading(self) -> None:
        """Start and stop the process once."""
        try:
            if self._functions:
                self.start()
        finally:
            self.stop()

    def run(self, call: WorkerCall, timeout: float | None, unneeded: Callable[[], bool]) -> Outcome:
        """Run a call and wait for its outcome."""
        if self._connection is None:
            self.start()
        assert self._connection is not None and self._process is not None
        key, state = call.state or (self._state_key, None)
        if key == self._state_key:
            state = None
        message = pickle.dumps((call.index, state, call.keywords, call.state is not None))
        try:
            self._connection.send_bytes(message)
            if (ended := self._wait_for_answer(self._connection, timeout, unneeded)) is not None:
                self.stop()
                return ended
            kind, value, seconds, logged = pickle.loads(self._connection.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._exit_status()
            self.stop()
            return Outcome("died", status, 0.0)
        self._state_key = key
        return Outcome(kind, value, seconds, logged)

    @staticmethod
    def _wait_for_answer(connection: Connection, timeout: float | None, unneeded: Callable[[], bool]) -> Outcome | None:
        started, limit = time.monotonic(), math.inf if timeout is None else timeout
        while not connection.poll(max(min(started + limit - time.monotonic(), LOOK_SECONDS), 0.0)):
            if time.monotonic() - started >= limit:
                return Outcome("late", None, limit)
            if unneeded():
                return Outcome("dropped", None, time.monotonic() - started)
        return None

    def _exit_status(self) -> int:
        assert self._process is not None
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def stop(self) -> None:
        """Kill the process and the programs that it started, if there is one."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class WorkerPool:
    """Workers with one queue. A daemon thread of this process drives each.

    Args:
        what: the functions' name in the notes, such as ``rewards``.
        size: number of processes; 0: no function runs in a worker.
        timeout: maximum seconds of one call; None: no limit.
    """

    def __init__(
        self, what: str, functions: Mapping[str, Callable[..., Any]], size: int, timeout: float | None
    ) -> None:
        able, reasons = travelling(functions) if size and functions else ({}, {})
        self.notes = [f"{what}: {', '.join(able)} in {size} worker process(es)"] if able else []  # for the user
        self.notes += [f"{what}: {name} runs in the trainer's process ({why})" for name, why in reasons.items()]
        self._indices = {name: index for index, name in enumerate(able)}
        self._timeout = timeout
        self._queue: queue.SimpleQueue[WorkerCall | None] = queue.SimpleQueue()
        self._workers = [Worker(list(able.values())) for _ in range(size if able else 0)]
        self._threads = [threading.Thread(target=self._serve, args=[w], daemon=True) for w in self._workers]
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: str) -> bool:
        """Return whether the function runs in this pool."""
        return name in self._indices

    def submit(self, name: str, keywords: dict[str, Any], state: tuple[Any, bytes] | None = None) -> WorkerCall:
        """Queue a call. If the worker can't be started or the call can't be sent, the outcome is ``raised``."""
        call = WorkerCall(self._indices[name], keywords, state)
        self._queue.put(call)
        return call

    def _serve(self, worker: Worker) -> None:
        while (call := self._queue.get()) is not None:
            if not call.set_running_or_notify_cancel():
                continue
            try:
                outcome = worker.run(call, self._timeout, functools.partial(self._stands_in_the_way, call))
            except BaseException as error:
                outcome = raised_outcome(error)
            call.keywords = {}  # free the texts before the outcome is read
            call.set_result(outcome)
        worker.stop()  # `close` may have stopped it while it was starting

    def _stands_in_the_way(self, call: WorkerCall) -> bool:
        """Return whether nobody waits for the call, and another call waits for its worker."""
        since = call.unneeded_since
        return since is not None and time.monotonic() - since >= DROP_SECONDS and not self._queue.empty()

    def close(self) -> None:
        """Drop queued calls and kill the workers. No function runs in this pool any more."""
        self._indices = {}
        with contextlib.suppress(queue.Empty):
            while (call := self._queue.get_nowait()) is not None:
                call.cancel()
        for _ in self._threads:
            self._queue.put(None)
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)  # a worker that starts now ends with the thread, or this process

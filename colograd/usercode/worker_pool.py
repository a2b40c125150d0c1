"""Reward workers: processes that call reward functions while the engine decodes, and that can be killed.

Functions travel by cloudpickle: importable ones by name, those of a script or a notebook by value. A call that takes
longer than its deadline is ended with its process, which is replaced; so is one that dies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

WORKER = Path(__file__).with_name("worker_process.py")
START_SECONDS = 120.0  # for a worker to import what its functions need
STOP_SECONDS = 5.0  # for a pool to end
LOOK_SECONDS = 0.1  # between two looks at whether a call that runs is still needed
DROP_SECONDS = 1.0  # that a call which nobody needs gets to end by itself: a new process takes as long


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call in a worker ended."""

    kind: str  # value, raised, late, died or dropped
    value: Any  # what was returned; (line, traceback) of what was raised; the exit status of what died
    seconds: float  # in the function
    logged: tuple[dict[str, list[Any]], dict[str, list[float]]] = ({}, {})  # columns and metrics, see `CallLog`


class Call(Future[Outcome]):
    """A call that is queued or runs in a worker."""

    unneeded_since: float | None = None  # time.monotonic() since when nobody waits for it

    def drop(self) -> None:
        """Nobody waits for it any more: it doesn't begin, or its worker is replaced when another call needs it."""
        if not self.cancel():
            self.unneeded_since = time.monotonic()


class CannotTravel(ValueError):
    """A function that can't be sent to another process."""


def travelling(function: Callable[..., Any]) -> bytes:
    """The function as bytes for a worker.

    Raises:
        CannotTravel: with the reason.
    """
    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects that it holds do when they are pickled
        raise CannotTravel(f"{type(error).__name__}: {error}".splitlines()[0]) from None


class Worker:
    """One process; started when it is first needed, and again after it ended."""

    def __init__(self, functions: Sequence[bytes]) -> None:
        self._functions = list(functions)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._state_key: Any = None  # which trainer state the process has

    def start(self) -> None:
        """Start the process and let it load the functions.

        Raises:
            CannotTravel: they can't be loaded there, with the reason.
        """
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._connection = connection = Connection(ours.detach())
        self._state_key = None
        paths = [os.getcwd() if path == "" else path for path in sys.path]
        connection.send_bytes(pickle.dumps((paths, self._functions)))
        try:
            problem = pickle.loads(connection.recv_bytes()) if connection.poll(START_SECONDS) else ("no answer", "")
        except EOFError:
            problem = (f"the worker ended with status {self._status()} while loading it", "")
        if problem is not None:
            self.stop()
            raise CannotTravel(problem[0])

    def probe(self) -> None:
        """Start and stop once. Raises CannotTravel where the functions can't be loaded."""
        try:
            self.start()
        finally:
            self.stop()

    def call(
        self,
        index: int,
        keywords: dict[str, Any],
        state: tuple[Any, bytes] | None,
        timeout: float | None,
        unneeded: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Call function ``index`` with ``keywords``.

        Args:
            state: a key and the pickled trainer state, which is sent only where the key is new to the process. None: no
                reward function, ``keywords`` are all that it gets.
            timeout: seconds; None waits for ever.
            unneeded: asked while it runs; once true, the call is ended with its process.
        """
        if self._connection is None:
            self.start()
        assert self._connection is not None and self._process is not None
        key, pickled = state or (self._state_key, None)
        message = pickle.dumps((index, None if key == self._state_key else pickled, keywords, state is not None))
        try:
            self._connection.send_bytes(message)
            if (ended := self._wait(self._connection, timeout, unneeded)) is not None:
                self.stop()
                return ended
            kind, value, seconds, logged = pickle.loads(self._connection.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._status()
            self.stop()
            return Outcome("died", status, 0.0)
        self._state_key = key
        return Outcome(kind, value, seconds, logged)

    @staticmethod
    def _wait(connection: Connection, timeout: float | None, unneeded: Callable[[], bool]) -> Outcome | None:
        """Until there is an answer: None. Or why there is to be none."""
        started = time.monotonic()
        while True:
            left = LOOK_SECONDS if timeout is None else started + timeout - time.monotonic()
            if connection.poll(max(min(left, LOOK_SECONDS), 0.0)):
                return None
            if timeout is not None and time.monotonic() - started >= timeout:
                return Outcome("late", None, timeout)
            if unneeded():
                return Outcome("dropped", None, time.monotonic() - started)

    def _status(self) -> int:
        """The exit status of a process that closed its socket; one that did so and lives on is killed."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def stop(self) -> None:
        """Kill the process, if there is one."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


_Queued = tuple[Call, tuple[int, dict[str, Any], tuple[Any, bytes] | None]]


class WorkerPool:
    """Some workers with one queue.

    Each is driven by a thread of this process that sleeps until its worker answers. The threads are daemons: a function
    that never returns doesn't keep the trainer from ending.

    Args:
        functions: by which calls are numbered, from `travelling`.
        size: processes.
        timeout: seconds that one call may take; None: any.
    """

    def __init__(self, functions: Sequence[bytes], size: int, timeout: float | None) -> None:
        self._timeout = timeout
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._workers = [Worker(functions) for _ in range(size)]
        self._threads = [threading.Thread(target=self._serve, args=[w], daemon=True) for w in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, index: int, keywords: dict[str, Any], state: tuple[Any, bytes] | None) -> Call:
        """Queue a call; see `Worker.call`. The future fails only where the worker can't be started or sent to."""
        future = Call()
        self._queue.put((future, (index, keywords, state)))
        return future

    def _serve(self, worker: Worker) -> None:
        try:
            self._serve_queue(worker)
        finally:
            worker.stop()  # which `close` may have called while it was starting

    def _serve_queue(self, worker: Worker) -> None:
        while (item := self._queue.get()) is not None:
            future, (index, keywords, state) = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                unneeded = functools.partial(self._stands_in_the_way, future)
                future.set_result(worker.call(index, keywords, state, self._timeout, unneeded))
            except BaseException as error:
                future.set_exception(error)

    def _stands_in_the_way(self, call: Call) -> bool:
        """Whether nobody waits for the call, and another one waits for its worker."""
        since = call.unneeded_since
        return since is not None and time.monotonic() - since >= DROP_SECONDS and not self._queue.empty()

    def close(self) -> None:
        """Kill the workers; calls that are queued are dropped."""
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[0].cancel()
        for _ in self._threads:
            self._queue.put(None)
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)  # a worker that starts isn't waited for: it ends with the thread, or this process

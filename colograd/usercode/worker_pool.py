"""Worker processes: they call reward functions and tools while the engine decodes, and can be killed.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from .outcome import Outcome

Key = TypeVar("Key")

WORKER = Path(__file__).with_name("worker_process.py")
START_SECONDS = 120.0  # for a worker to import what its functions need
STOP_SECONDS = 5.0  # for a pool to end
LOOK_SECONDS = 0.1  # between two looks at whether a call that runs is still needed
DROP_SECONDS = 1.0  # that a call which nobody needs gets to end by itself: a new process takes as long


class WorkerCall(Future[Outcome]):
    """A call that is queued or runs in a worker.

    Args:
        index: of the function among those that the worker has.
        state: a key and the pickled trainer state, which is sent only where the key is new to the process. None: no
            reward function, ``keywords`` are all that it gets.
    """

    def __init__(self, index: int, keywords: dict[str, Any], state: tuple[Any, bytes] | None) -> None:
        super().__init__()
        self.index, self.keywords, self.state = index, keywords, state
        self.unneeded_since: float | None = None  # time.monotonic() since when nobody waits for it

    def cancel(self) -> bool:
        """Nobody waits for it any more: it doesn't begin, or its worker is replaced when another call needs it."""
        cancelled = super().cancel()
        if not cancelled:
            self.unneeded_since = time.monotonic()
        return cancelled


class CannotTravel(ValueError):
    """A function that can't be sent to another process."""


def travelling(functions: Mapping[Key, Callable[..., Any]]) -> tuple[dict[Key, bytes], dict[Key, CannotTravel]]:
    """The functions that can run in a worker, as bytes, and why the others can't."""
    able: dict[Key, bytes] = {}
    reasons: dict[Key, CannotTravel] = {}
    for key, function in functions.items():
        try:
            able[key] = cloudpickle.dumps(function)
        except Exception as error:  # whatever the objects that it holds do when they are pickled
            reasons[key] = CannotTravel(f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        Worker(list(able.values())).try_loading()
    except CannotTravel:  # find out which; a start takes as long as the functions' imports
        for key, pickled in list(able.items()):
            try:
                Worker([pickled]).try_loading()
            except CannotTravel as reason:
                del able[key]
                reasons[key] = reason
    return able, reasons


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
            problem = (f"the worker ended with status {self._exit_status()} while loading it", "")
        if problem is not None:
            self.stop()
            raise CannotTravel(problem[0])

    def try_loading(self) -> None:
        """Start and stop once. Raises CannotTravel where the functions can't be loaded."""
        try:
            if self._functions:
                self.start()
        finally:
            self.stop()

    def run(self, call: WorkerCall, timeout: float | None, unneeded: Callable[[], bool]) -> Outcome:
        """How a call ends, waited for.

        Args:
            timeout: seconds; None waits for ever.
            unneeded: asked while it runs; once true, the call is ended with its process.
        """
        if self._connection is None:
            self.start()
        assert self._connection is not None and self._process is not None
        key, pickled = call.state or (self._state_key, None)
        new_state = None if key == self._state_key else pickled
        message = pickle.dumps((call.index, new_state, call.keywords, call.state is not None))
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
        """None once there is an answer, or why there will be none."""
        started = time.monotonic()
        while True:
            left = LOOK_SECONDS if timeout is None else started + timeout - time.monotonic()
            if connection.poll(max(min(left, LOOK_SECONDS), 0.0)):
                return None
            if timeout is not None and time.monotonic() - started >= timeout:
                return Outcome("late", None, timeout)
            if unneeded():
                return Outcome("dropped", None, time.monotonic() - started)

    def _exit_status(self) -> int:
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
        self._queue: queue.SimpleQueue[WorkerCall | None] = queue.SimpleQueue()
        self._workers = [Worker(functions) for _ in range(size)]
        self._threads = [threading.Thread(target=self._serve, args=[w], daemon=True) for w in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, index: int, keywords: dict[str, Any], state: tuple[Any, bytes] | None) -> WorkerCall:
        """Queue a call. The future fails only where the worker can't be started or sent to."""
        call = WorkerCall(index, keywords, state)
        self._queue.put(call)
        return call

    def _serve(self, worker: Worker) -> None:
        while (call := self._queue.get()) is not None:
            if not call.set_running_or_notify_cancel():
                continue
            try:
                unneeded = functools.partial(self._stands_in_the_way, call)
                call.set_result(worker.run(call, self._timeout, unneeded))
            except BaseException as error:
                call.set_exception(error)
        worker.stop()  # which `close` may have called while it was starting

    def _stands_in_the_way(self, call: WorkerCall) -> bool:
        """Whether nobody waits for the call, and another one waits for its worker."""
        since = call.unneeded_since
        return since is not None and time.monotonic() - since >= DROP_SECONDS and not self._queue.empty()

    def close(self) -> None:
        """Kill the workers; calls that are queued are dropped."""
        with contextlib.suppress(queue.Empty):
            while (call := self._queue.get_nowait()) is not None:
                call.cancel()
        for _ in self._threads:
            self._queue.put(None)
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)  # a worker that starts isn't waited for: it ends with the thread, or this process

"""Signals that stop a run: SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C, and the deadline of such a stop.

A stop without a deadline ends the round: the trainer reads `StopSignal.received` at the end of each step. With a
deadline, a thread acts at two moments. `schedule` computes them. At the first one it sets `is_cut`: the engine stops
between two of its steps, or training between two optimizer steps. At the second one it ends the process by force,
because a long backward pass, reward function or save can't be interrupted. Nothing is lost then: scored groups are in
the rollout log, and half a checkpoint is none.

Outside of the training, while the trainer is built or a finished model is saved, no step can be finished. A second
`StopSignal` (`outside_training`) then ends all ranks at once, with the same status.

A script that ends after such a stop ends by `StopSignal.end_process`. The interpreter's teardown would take seconds,
and threads don't run in it, so that the process could outlive its deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any, NoReturn

INTERRUPT = "Ctrl-C"
REPEATED = 2.0  # Seconds in which a launcher may send the scheduler's signal again.
RESERVE = 10.0  # Seconds kept for the end of the run, if the deadline leaves twice as many.
MARGIN = 2.0  # Seconds before the deadline at which the process ends by force. At most a fifth of the seconds left.
TORCHRUN_GRACE = 30.0  # Seconds from SIGTERM to SIGKILL of torchrun's ranks, if its variable isn't set.
TERMINATED = 143  # Exit status of a process that SIGTERM ended, 128 + 15.
# A scheduler that restarts a job by its exit status, or counts status 0 as success, sets a variable with this prefix.
SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_")


def exit_status(setting: int | None, environ: Mapping[str, str]) -> int:
    """Return the exit status after a stop: `exit_status_after_stop`, or 143 under a scheduler and 0 elsewhere."""
    if setting is not None:
        return setting
    return TERMINATED if any(name.startswith(SCHEDULERS) for name in environ) else 0


def seconds_left(stop_within: float | None, environ: Mapping[str, str], now: float, name: str) -> float | None:
    """Return the seconds until the process must be gone; None: nobody sets a limit.

    Slurm sets a variable with a job's end, the limit after an early warning (``--signal=USR1@120``). Neither Slurm nor
    Kubernetes sets one with the seconds between SIGTERM and SIGKILL. torchrun waits `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`
    seconds, and ranks can't see its option ``--shutdown-timeout``, so that ``stop_within`` replaces this limit.

    Args:
        now: seconds since 1970.
        name: name of the signal.
    """
    end = environ.get("SLURM_JOB_END_TIME", "")
    limits = [float(end) - now] if end.isdigit() else []
    limits = [limit for limit in limits if limit > 0]
    if stop_within is not None:
        limits.append(stop_within)
    elif "TORCHELASTIC_RUN_ID" in environ and name == "SIGTERM":
        limits.append(float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_GRACE)))
    return min(limits, default=None)


def schedule(seconds: float, save_seconds: float = 0.0) -> tuple[float, float]:
    """Return after how many seconds the round is cut, and after how many the process ends by force.

    Args:
        seconds: seconds until the deadline.
        save_seconds: seconds that the last checkpoint took.
    """
    reserve = max(RESERVE, 2 * save_seconds)
    return seconds - min(reserve, seconds / 2), seconds - min(MARGIN, seconds / 5)


class StopSignal:
    """Records the first signal, so that the trainer can write a checkpoint before it stops, and keeps the deadline.

    A second signal ends the run at once. A second Ctrl-C interrupts as it would without the handler.

    Args:
        speaks: answer Ctrl-C with a line, because the end of the round may take a while.
        names: signals that stop the run in addition to Ctrl-C.
        stop_within: seconds from a signal to the end of the process; None: the environment's limit, if it has one.
        status: exit status after a stop.
    """

    save_seconds = 0.0  # Seconds that the last checkpoint took.
    why = "as its time is over"  # Reason in the message of a process that ends by force.

    def __init__(
        self, speaks: bool = False, names: Collection[str] = ("SIGTERM",), stop_within: float | None = None,
        status: int = 0,
    ) -> None:  # fmt: skip
        self.received = ""  # Name of the first signal. After a step or with a deadline: of any rank.
        self.is_cut = False  # Whether the round must end now.
        self.status = status
        self.tell: Callable[[str, float], None] = lambda name, seconds: None  # Sends the seconds left to other ranks.
        self.cut: Callable[[], None] = lambda: None  # Called in the thread when the round must end.
        self.leave: Callable[[], None] = lambda: None  # Tells other ranks that this rank may end.
        self._speaks, self._stop_within = speaks, stop_within
        self._numbers = {getattr(signal, name): name for name in names} | {signal.SIGINT: INTERRUPT}
        self._previous: dict[int, Any] = {}
        self._previous_descriptor = -1
        self._reset()

    def _reset(self) -> None:
        self.received, self.is_cut = "", False
        self._noticed = False  # Whether this process received a signal.
        self._first = self._cut_at = self._end_at = float("inf")  # Times by `time.monotonic`.
        self._socket: socket.socket | None = None  # The C handler writes each signal's number into it.

    @classmethod
    def outside_training(cls, names: Collection[str], status: int, tell: Callable[[str, float], None]) -> StopSignal:
        """Return a `StopSignal`, installed, that ends the process and the other ranks at the first signal.

        Ctrl-C still raises KeyboardInterrupt, and a signal with a handler of the user's script keeps this handler. The
        object refers to nothing of the trainer, so that a trainer that nobody closes can be freed.

        Args:
            tell: sends the signal's name and the seconds left (0) to the other ranks.
        """
        stop = cls(names=names, stop_within=0.0, status=status)
        stop.why, stop.tell = "because no training was under way", tell
        handlers = {number: signal.getsignal(number) for number in stop._numbers}
        stop._numbers = {
            number: name
            for number, name in stop._numbers.items()
            if name != INTERRUPT
            and (handlers[number] == signal.SIG_DFL or isinstance(getattr(handlers[number], "__self__", None), cls))
        }
        stop.install()
        return stop

    def install(self) -> None:
        """Install the handlers. Only the main thread can; in another (a notebook's worker) this does nothing."""
        if threading.current_thread() is not threading.main_thread() or self in _installed:
            self.received = ""
            return
        self._reset()
        ours, self._socket = socket.socketpair()
        self._socket.setblocking(False)
        # Python's handlers wait for the end of a call of C, such as a collective. The thread doesn't.
        self._previous_descriptor = signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)
        _installed.append(self)
        self._thread = threading.Thread(target=self._watch, args=(ours,), name="colograd-stop", daemon=True)
        self._thread.start()
        self._previous = {number: signal.signal(number, self._notice) for number in self._numbers}

    def remove(self) -> None:
        """Restore the previous signal handlers. A deadline that is already set stays in force."""
        self._restore()
        if not self.has_deadline:
            self._end_thread()

    def _restore(self) -> None:
        if self not in _installed or self._socket is None:
            return
        _installed.remove(self)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._notice:  # else the user's script has installed another handler
                signal.signal(number, handler)
        descriptor = self._socket.fileno()
        if (present := signal.set_wakeup_fd(self._previous_descriptor)) != descriptor:
            signal.set_wakeup_fd(present)
        for later in _installed:  # another trainer's must not restore these handlers
            later._previous |= {n: self._previous[n] for n, each in later._previous.items() if each == self._notice}
            if later._previous_descriptor == descriptor:
                later._previous_descriptor = self._previous_descriptor

    def forget_deadline(self) -> None:
        """Cancel the deadline, because the training has finished."""
        self._cut_at = self._end_at = float("inf")
        atexit.unregister(self.end_process)
        if self not in _installed:  # else keep the socket open: the C handler writes into it until `remove`
            self._end_thread()

    @property
    def has_deadline(self) -> bool:
        """Whether the process must end at a given time."""
        return self._end_at < float("inf")

    def end_process(self) -> NoReturn:
        """End the process with `status`, or after an exception with 1, without the interpreter's teardown."""
        self.leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self.status if getattr(sys, "last_value", None) is None else 1)

    def _end_thread(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if threading.current_thread() is not self._thread:
                self._thread.join(1.0)  # It ends at once, because its socket has no other end.

    def stop(self, name: str, seconds: float) -> None:
        """Stop this rank within so many seconds. Another rank got the signal. Callable in any thread."""
        now = time.monotonic()
        self.received = self.received or name
        self._first = min(self._first, now)
        if now + seconds < self._end_at:
            cut, end = schedule(seconds, self.save_seconds)
            if not self.has_deadline:
                atexit.register(self.end_process)  # runs before exit functions that libraries registered earlier
            self._cut_at, self._end_at = min(self._cut_at, now + cut), now + end
        if (waker := self._socket) is not None:
            with contextlib.suppress(OSError):
                waker.send(b"\0")

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._noticed:  # `received` may be another rank's, of the same Ctrl-C
            self.remove()
            raise KeyboardInterrupt
        self._noticed = True
        self.received = self.received or self._numbers[signal.Signals(number)]
        if number == signal.SIGINT and self._speaks:  # not with print: the signal may interrupt one
            os.write(2, b"\nCtrl-C: the run ends with a checkpoint after this round; a second one ends it at once\n")

    # -- the thread

    def _watch(self, signals: socket.socket) -> None:
        with signals:
            while True:
                until = self._end_at if self.is_cut else self._cut_at
                signals.settimeout(None if until == float("inf") else max(0.01, until - time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    if not (numbers := signals.recv(64)):
                        return
                    for name in (self._numbers.get(number) for number in numbers):
                        if name not in (None, INTERRUPT):
                            self._take(name)
                now = time.monotonic()
                if now >= self._cut_at and not self.is_cut:
                    self.is_cut = True
                    self.cut()
                if now >= self._end_at:
                    self._end()

    def _take(self, name: str) -> None:
        """Begin the stop at the first signal. End the process at a second one, unless a launcher repeated the first."""
        now = time.monotonic()
        if now - self._first > REPEATED:
            self.stop(name, 0.0)
            self.tell(name, 0.0)
            return
        is_first, self._first = self._first == float("inf"), min(self._first, now)
        self.received = self.received or name
        if is_first and (seconds := seconds_left(self._stop_within, os.environ, time.time(), name)) is not None:
            self.stop(name, seconds)
            self.tell(name, seconds)

    def _end(self) -> NoReturn:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        line = f"colograd: {self.received}: stopped at once, {self.why}; the same command goes on from the last "
        os.write(2, (line + "checkpoint and the rollout log with resume_from_checkpoint: auto\n").encode())
        os._exit(self.status)


def _detach_child() -> None:
    """Give a forked child the handlers that the process had before, so that a pool can end its workers by SIGTERM."""
    for stop in reversed(_installed[:]):
        stop._restore()


_installed: list[StopSignal] = []  # in the order of their installation
os.register_at_fork(after_in_child=_detach_child)

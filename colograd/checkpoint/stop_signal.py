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

    A second signal ends the run at once. A second Ctrl-C interrupts as it would without the handler. If several are
    installed, only the last one gets signals.

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
        self.status = status
        self.tell: Callable[[str, float], None] = lambda name, seconds: None  # Sends the seconds left to other ranks.
        self.leave: Callable[[], None] = lambda: None  # Tells other ranks that this rank may end.
        self._speaks, self._stop_within = speaks, stop_within
        self.names: dict[int, str] = {getattr(signal, name): name for name in names} | {signal.SIGINT: INTERRUPT}
        self._replaced: dict[int, Any] = {}  # Handlers that `_notice` has replaced, by signal.
        self._timers: list[threading.Timer] = []
        self._reset()

    def _reset(self) -> None:
        self.received = ""  # Name of the first signal. After a step or with a deadline: of any rank.
        self.is_cut = False  # Whether the round must end now.
        self._noticed = False  # Whether this process received a signal.
        self._first = float("inf")  # Times by `time.monotonic`: of the first signal, and of the deadline.
        self.forget_deadline()

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
        stop.names = {
            number: name
            for number, name in stop.names.items()
            if name != INTERRUPT and signal.getsignal(number) in (signal.SIG_DFL, _notice)
        }
        stop.install()
        return stop

    def install(self) -> None:
        """Install the handlers. Only the main thread can; in another (a notebook's worker) this does nothing."""
        if threading.current_thread() is not threading.main_thread() or self in _installed:
            self.received = ""
            return
        self._reset()
        if not _installed:
            numbers, waker = socket.socketpair()
            waker.setblocking(False)
            # Python's handlers wait for the end of a call of C, such as a collective. The thread doesn't.
            _wakeup[:] = waker, signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=_watch, args=(numbers,), name="colograd-stop", daemon=True).start()
        _installed.append(self)
        self._replaced = {number: signal.signal(number, _notice) for number in self.names}

    def remove(self) -> None:
        """Restore the previous signal handlers. A deadline that is already set stays in force."""
        if self not in _installed:
            return
        later = _installed[_installed.index(self) + 1 :]
        _installed.remove(self)
        for number, handler in self._replaced.items():
            heir = next((each for each in later if each._replaced.get(number) is _notice), None)
            if heir is not None:  # another trainer's, which must not restore this handler
                heir._replaced[number] = handler
            elif signal.getsignal(number) is _notice:  # else the user's script has installed another handler
                signal.signal(number, handler)
        if not _installed:
            waker, before = _wakeup
            if (present := signal.set_wakeup_fd(before)) != waker.fileno():
                signal.set_wakeup_fd(present)
            waker.close()  # The thread ends, because its socket has no other end.

    def forget_deadline(self) -> None:
        """Cancel the deadline, because the training has finished."""
        self._end_at = float("inf")
        while self._timers:
            self._timers.pop().cancel()
        atexit.unregister(self.end_process)

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

    def stop(self, name: str, seconds: float) -> None:
        """Stop this rank within so many seconds. Another rank got the signal. Callable in any thread."""
        now = time.monotonic()
        self.received = self.received or name
        self._first = min(self._first, now)
        if now + seconds < self._end_at:
            cut, end = schedule(seconds, self.save_seconds)
            if not self.has_deadline:
                atexit.register(self.end_process)  # runs before exit functions that libraries registered earlier
            self._end_at = now + end
            for delay, action in ((cut, self._cut), (end, self._end)):
                self._timers.append(timer := threading.Timer(delay, action))
                timer.daemon = True
                timer.start()

    def take(self, name: str) -> None:
        """Begin the stop at the first signal. End the process at a second one, unless a launcher repeated the first."""
        now, first = time.monotonic(), self._first
        seconds: float | None = 0.0
        if now - first <= REPEATED:
            seconds = seconds_left(self._stop_within, os.environ, time.time(), name) if first == float("inf") else None
        self._first, self.received = min(first, now), self.received or name
        if seconds is not None:
            self.tell(name, seconds)
            self.stop(name, seconds)

    def notice(self, number: int) -> None:
        if number == signal.SIGINT and self._noticed:  # `received` may be another rank's, of the same Ctrl-C
            self.remove()
            raise KeyboardInterrupt
        self._noticed = True
        self.received = self.received or self.names[number]
        if number == signal.SIGINT and self._speaks:  # not with print: the signal may interrupt one
            os.write(2, b"\nCtrl-C: the run ends with a checkpoint after this round; a second one ends it at once\n")

    def _cut(self) -> None:
        self.is_cut = True

    def _end(self) -> NoReturn:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        line = f"colograd: {self.received}: stopped at once, {self.why}; the same command goes on from the last "
        os.write(2, (line + "checkpoint and the rollout log with resume_from_checkpoint: auto\n").encode())
        os._exit(self.status)


_installed: list[StopSignal] = []  # in the order of their installation
# The socket that Python's C handler writes each signal's number into, and the descriptor that was set before.
_wakeup: list[Any] = []


def _watch(numbers: socket.socket) -> None:
    with numbers:
        while received := numbers.recv(64):
            for number in received:
                if (stop := _last_of(number)) is not None and number != signal.SIGINT:
                    stop.take(stop.names[number])


def _notice(number: int, frame: FrameType | None) -> None:
    if (stop := _last_of(number)) is not None:
        stop.notice(number)


def _last_of(number: int) -> StopSignal | None:
    return next((stop for stop in reversed(_installed) if number in stop.names), None)


# A forked child gets the handlers that the process had before, so that a pool can end its workers by SIGTERM.
os.register_at_fork(after_in_child=lambda: [*map(StopSignal.remove, reversed(_installed[:]))])

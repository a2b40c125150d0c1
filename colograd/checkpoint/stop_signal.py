"""Signals that stop a run (Ctrl-C, and the signals in the setting `stop_signals`), and the deadline of the stop.

Without a deadline the run stops at the end of the round (the optimizer steps between two generations). With a deadline
the trainer interrupts the round when `is_cut` becomes true, in time for a last checkpoint. A long backward, reward
function or save can't be interrupted. So shortly before the deadline a timer ends the process if it still runs. A
process with a deadline skips the interpreter's teardown: it takes seconds, and the timer wouldn't run during it. A
resumed run continues from the last checkpoint and the rollout log."""

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
REPEATED = 2.0  # Seconds after the first signal until a further signal counts, because launchers repeat signals.
RESERVE = 10.0  # Seconds reserved for the last checkpoint, see `schedule`.
MARGIN = 2.0  # Seconds from the process's end by force to the deadline, see `schedule`.
TORCHRUN_GRACE = 30.0  # torchrun's default seconds between SIGTERM and SIGKILL of a rank.
TERMINATED = 143  # exit status of a process that SIGTERM ended: 128 + the signal's number
# Environment variables of schedulers that would count a stopped job with exit status 0 as finished.
SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_")


def exit_status(setting: int | None, environ: Mapping[str, str]) -> int:
    if setting is not None:
        return setting
    return TERMINATED if any(name.startswith(SCHEDULERS) for name in environ) else 0


def seconds_left(stop_within: float | None, environ: Mapping[str, str], now: float, name: str) -> float | None:
    """Return the seconds until the process must have ended. None: no known limit. ``now`` is in seconds since 1970.

    The smaller of two limits counts: the time to the Slurm job's end, and ``stop_within``. If ``stop_within`` is None,
    and the signal ``name`` is a SIGTERM under torchrun, the second limit is torchrun's time from SIGTERM to SIGKILL.
    This time is the environment variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT, by default `TORCHRUN_GRACE`. A job can't read
    torchrun's ``--shutdown-timeout``, nor the time from SIGTERM to SIGKILL of Slurm or Kubernetes."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    limits = [float(end) - now] if end.isdigit() and float(end) > now else []
    if stop_within is not None:
        limits.append(stop_within)
    elif "TORCHELASTIC_RUN_ID" in environ and name == "SIGTERM":
        limits.append(float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_GRACE)))
    return min(limits, default=None)


def schedule(seconds: float, save_seconds: float = 0.0) -> tuple[float, float]:
    """Return the seconds from now until the round must be interrupted, and until the process is ended by force.

    ``seconds``: time left until the deadline. ``save_seconds``: duration of a checkpoint's save."""
    reserve = max(RESERVE, 2 * save_seconds)
    return seconds - min(reserve, seconds / 2), seconds - min(MARGIN, seconds / 5)


class StopSignal:
    """Records the first stop signal, so that the trainer can write a checkpoint before it stops. Enforces the deadline.

    Ctrl-C raises KeyboardInterrupt if this process has received a stop signal before. A signal in ``names`` ends the
    process at once if the first signal in ``names`` on any rank came more than `REPEATED` seconds earlier.

    ``speaks``: whether Ctrl-C prints a line. ``stop_within``: seconds from a signal to the deadline (None: not set).
    ``status``: exit status of the process after a stop."""

    save_seconds = 0.0
    why = "as its time is over"

    def __init__(
        self, speaks: bool = False, names: Collection[str] = ("SIGTERM",), stop_within: float | None = None,
        status: int = 0,
    ) -> None:  # fmt: skip
        self.status = status
        # Sends a signal's name, and the seconds to the deadline, to the other ranks.
        self.tell: Callable[[str, float], None] = lambda name, seconds: None
        self.leave: Callable[[], None] = lambda: None  # Reports to other ranks that this rank's end is no failure.
        self._speaks, self._stop_within = speaks, stop_within
        self.names: dict[int, str] = {getattr(signal, name): name for name in names} | {signal.SIGINT: INTERRUPT}
        self._timers: list[threading.Timer] = []
        self._reset()

    def _reset(self) -> None:
        self.received = ""  # Name of the first signal that this rank knows of.
        self.is_cut = False  # Whether the round must be interrupted now.
        self._noticed = False
        self._first = float("inf")
        self.forget_deadline()

    @classmethod
    def outside_training(cls, names: Collection[str], status: int, tell: Callable[[str, float], None]) -> StopSignal:
        """Install and return a `StopSignal` for the time outside of training.

        A signal in ``names`` then ends all ranks at once, unless the user's script handles it. Ctrl-C isn't changed."""
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
        """Install handlers of the signals, but only in the main thread, because Python lets no other thread do this."""
        if threading.current_thread() is not threading.main_thread() or self in _installed:
            self.received = ""
            return
        self._reset()
        if not _installed:
            numbers, waker = socket.socketpair()
            waker.setblocking(False)
            # A thread reads the signals: Python runs handlers only after a call of C code, such as a collective, ends.
            _wakeup[:] = waker, signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=_watch, args=(numbers,), name="colograd-stop", daemon=True).start()
        _installed.append(self)
        before = {number: signal.signal(number, _notice) for number in self.names}
        self._replaced = {number: handler for number, handler in before.items() if handler is not _notice}

    def remove(self) -> None:
        """Restore the previous handlers of the signals. A deadline that is set stays in force."""
        if self not in _installed:
            return
        later = _installed[_installed.index(self) + 1 :]
        _installed.remove(self)
        for number, handler in self._replaced.items():
            if heir := next((each for each in later if number in each.names), None):
                heir._replaced.setdefault(number, handler)
            elif signal.getsignal(number) is _notice:  # leave a handler that the user's script has installed since
                signal.signal(number, handler)
        if not _installed:
            waker, before = _wakeup
            if (present := signal.set_wakeup_fd(before)) != waker.fileno():
                signal.set_wakeup_fd(present)
            waker.close()

    def forget_deadline(self) -> None:
        self._end_at = float("inf")
        while self._timers:
            self._timers.pop().cancel()
        atexit.unregister(self.end_process)

    @property
    def has_deadline(self) -> bool:
        return self._end_at < float("inf")

    def end_process(self) -> NoReturn:
        """End the process without the interpreter's teardown."""
        self.leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self.status if getattr(sys, "last_value", None) is None else 1)

    def stop(self, name: str, seconds: float) -> None:
        """Record a signal that any rank received. Set a deadline ``seconds`` from now, if no earlier deadline is set.

        Any thread may call this method."""
        now = time.monotonic()
        self.received = self.received or name
        self._first = min(self._first, now)
        if now + seconds < self._end_at:
            cut, end = schedule(seconds, self.save_seconds)
            if not self.has_deadline:
                atexit.register(self.end_process)  # `end_process` skips exit functions registered before it
            self._end_at = now + end
            for delay, action in ((cut, lambda: setattr(self, "is_cut", True)), (end, self._end)):
                self._timers.append(timer := threading.Timer(delay, action))
                timer.daemon = True
                timer.start()

    def take(self, name: str) -> None:
        now, first = time.monotonic(), self._first
        seconds: float | None = 0.0
        if now - first <= REPEATED:
            seconds = seconds_left(self._stop_within, os.environ, time.time(), name) if first == float("inf") else None
        self._first, self.received = min(first, now), self.received or name
        if seconds is not None:
            self.tell(name, seconds)
            self.stop(name, seconds)

    def _end(self) -> NoReturn:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        line = f"colograd: {self.received}: stopped at once, {self.why}; the same command goes on from the last "
        os.write(2, (line + "checkpoint and the rollout log with resume_from_checkpoint: auto\n").encode())
        os._exit(self.status)


_installed: list[StopSignal] = []
# Socket that gets each signal's number from Python's C handler, and the wakeup descriptor set before.
_wakeup: list[Any] = []


def _watch(numbers: socket.socket) -> None:
    with numbers:
        while received := numbers.recv(64):
            for number in received:
                if (stop := _last_of(number)) is not None and number != signal.SIGINT:
                    stop.take(stop.names[number])


def _notice(number: int, frame: FrameType | None) -> None:
    if (stop := _last_of(number)) is None:
        return
    if number == signal.SIGINT and stop._noticed:  # not `received`, because another rank's signal may have set it
        stop.remove()
        raise KeyboardInterrupt
    stop._noticed = True
    stop.received = stop.received or stop.names[number]
    if number == signal.SIGINT and stop._speaks:  # `print` isn't safe here, because the signal may interrupt a `print`
        os.write(2, b"\nCtrl-C: the run ends with a checkpoint after this round; a second one ends it at once\n")


def _last_of(number: int) -> StopSignal | None:
    return next((stop for stop in reversed(_installed) if number in stop.names), None)


# In a forked child the previous handlers are restored, so that a process pool can end its workers by SIGTERM.
os.register_at_fork(after_in_child=lambda: [*map(StopSignal.remove, reversed(_installed[:]))])

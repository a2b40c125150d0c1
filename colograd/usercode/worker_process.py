"""Main program of a worker process: ``python worker_process.py FD``. This file imports nothing of Colograd.

User code runs on the main thread, because Python handles signals only there. Messages on the socket FD are pickles:

    from the parent   first (sys.path, pickled functions)
                      per call (index of the function, pickled new trainer state or None, keywords, is_reward)
    to the parent     first a loading error or None per function
                      per call the fields of `Outcome`"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import numbers
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

# Colograd's folder. Tracebacks for users leave out leading frames of the files in `PLUMBING`.
COLOGRAD = os.path.dirname(os.path.dirname(__file__))
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Schedulers stop a job with these signals.
PER_TOKEN = ("completion_ids", "completion_mask")  # Arguments that workers get as arrays or bytes, not as lists.
PLUMBING = (os.path.join(COLOGRAD, "usercode", ""), os.path.join(COLOGRAD, "rewards", ""))


class CallLog:
    """Values that a call of a reward function logs. The function gets the methods `extra` and `metric` as its arguments
    ``log_extra`` and ``log_metric``."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Any) -> None:
        """Append one value per completion to a column of the completions table."""
        _check_name("log_extra", "column", column)
        values = _plain(values)
        if not isinstance(values, (list, tuple)):
            got = f"{values!r:.60} ({type(values).__name__})"
            raise TypeError(f"log_extra({column!r}, ...) got {got}, but takes a list with one value per completion.")
        self.columns.setdefault(column, []).extend(map(_plain, values))

    def metric(self, name: str, value: Any) -> None:
        """Append a number to a metric. The mean of all its numbers is reported."""
        _check_name("log_metric", "metric", name)
        value = _plain(value)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            got = f"{value!r:.60} ({type(value).__name__})"
            raise TypeError(f"log_metric({name!r}, ...) got {got}, but takes a finite number: skip other values.")
        self.metrics.setdefault(name, []).append(float(value))


def _check_name(function: str, kind: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"{function}({name!r:.60}, ...): the {kind}'s name must be a text, and not empty.")


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach()
    return value.tolist() if hasattr(value, "tolist") else value


def main(descriptor: int) -> None:
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        # Linux kills this process when the thread that started it ends, even in an endless loop.
        ctypes.CDLL("libc.so.6").prctl(set_parent_death_signal, signal.SIGKILL)
    _leave_signals_to_parent()
    connection = Connection(descriptor)
    called, problems = list[Any](), list[str | None]()
    sys.path[:], functions = pickle.loads(connection.recv_bytes())
    for function in functions:
        try:
            called.append(pickle.loads(function))
            problems.append(None)
        except BaseException as error:
            problems.append(line_and_traceback(error)[0])
    connection.send_bytes(pickle.dumps(problems))
    state: Any = None
    while True:
        try:
            index, new_state, keywords, is_reward = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if new_state is not None:
            state = pickle.loads(new_state)
        connection.send_bytes(_answer(called[index], keywords, state, is_reward))


def _answer(function: Any, keywords: dict[str, Any], state: Any, is_reward: bool) -> bytes:
    log = CallLog()
    given_here = {"trainer_state": state, "log_extra": log.extra, "log_metric": log.metric} if is_reward else {}
    keywords |= {name: value for name, value in given_here.items() if name in keywords}
    for name in PER_TOKEN if is_reward else ():
        if name in keywords:
            keywords[name] = [list(values) for values in keywords[name]]
    started = time.perf_counter()
    try:
        value = function(**keywords)
        value = _plain(value) if is_reward else value
    except (Exception, SystemExit) as error:
        return pickle.dumps(("raised", line_and_traceback(error), time.perf_counter() - started, ({}, {})))
    seconds = time.perf_counter() - started
    try:
        return pickle.dumps(("value", value, seconds, (log.columns, log.metrics)))
    except Exception as error:
        line = f"{type(error).__name__}: {error} (in what it returned or logged)"
        return pickle.dumps(("raised", (line, line), seconds, ({}, {})))


def line_and_traceback(error: BaseException) -> tuple[str, str]:
    """Return an error as "type: message", and its traceback without Colograd's leading frames."""
    frames = step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename.startswith(PLUMBING):
            frames = step.tb_next or frames
        step = step.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return f"{type(error).__name__}: {error}", text


def _leave_signals_to_parent() -> None:
    """Ignore Ctrl-C and schedulers' signals: the trainer needs its workers to finish the round before it stops.

    Schedulers' signals get an empty handler, because programs that user code starts would inherit ``SIG_IGN``. A fork
    blocks these signals until the child has default handlers. Otherwise the empty handler could swallow a signal."""

    def ignore(number: int, frame: Any) -> None:
        pass

    def reset() -> None:
        for number in STOPS:
            if signal.getsignal(number) is ignore:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOPS)
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOPS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in STOPS:
        signal.signal(number, ignore)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)
    unblock()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)

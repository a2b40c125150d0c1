"""`Spare`: turns errors of logs and trackers into one warning, because such errors must not end a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

# Methods of a tracker. Their errors don't end the run. Errors at a tracker's start do, so that the user can fix them.
EVENTS = ("on_step_end", "on_log", "on_evaluate", "on_predict", "on_save", "on_train_end")


class Spare:
    """Makes context managers that turn an exception into a warning. Only the first exception gives a warning."""

    def __init__(self, warn: Callable[[str], None] = lambda line: None) -> None:
        self._warn, self._told = warn, False

    @contextlib.contextmanager
    def __call__(self, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # An error of a log or tracker must not end the run.
            if not self._told:
                self._told = True
                line = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
                self._warn(f"{problem} ({line}); said once")


def spare_from_trackers(trainer: Any) -> None:
    """Turn errors of transformers' trackers after their start, such as a full disk, into a warning."""
    spare = Spare(trainer.console.warn)
    for callback in trainer.callback_handler.callbacks:
        if not type(callback).__module__.startswith("transformers.integrations"):
            continue
        for name in EVENTS:
            if name not in vars(callback):
                spared = spare(f"trackers: {type(callback).__name__} doesn't take all that is sent")
                setattr(callback, name, spared(getattr(callback, name)))

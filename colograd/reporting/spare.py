"""Protection of a run from errors of its diagnoses: the first error of a writer is one warning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# A tracker's methods that transformers calls during a run. The user must fix errors while a tracker starts.
EVENTS = ("on_step_end", "on_log", "on_evaluate", "on_predict", "on_save", "on_train_end")


class Spare:
    """Context managers that turn an error into a warning, once."""

    def __init__(self, warn: Callable[[str], None] = lambda line: None) -> None:
        self._warn, self._told = warn, False

    @contextmanager
    def __call__(self, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a diagnosis isn't worth a run
            if not self._told:
                self._told = True
                line = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
                self._warn(f"{problem} ({line}); said once")


def spare_from_trackers(callbacks: Iterable[Any], spare: Spare) -> None:
    """Keep errors of transformers' own trackers (a full disk, say) from ending the run once they have started."""
    for callback in callbacks:
        if not type(callback).__module__.startswith("transformers.integrations"):
            continue
        for name in EVENTS:
            if name not in vars(callback):
                spared = spare(f"trackers: {type(callback).__name__} doesn't take all that is sent")
                setattr(callback, name, spared(getattr(callback, name)))

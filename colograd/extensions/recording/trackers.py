"""Tables, histograms and alarms for trackers (W&B, trackio, TensorBoard)."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

ALERT_LEVELS = {"severe": "ERROR", "warning": "WARN", "note": "INFO"}
# In these methods of trackers' callbacks an error becomes a warning. Errors at a tracker's start end the run.
EVENTS = ("on_step_end", "on_log", "on_evaluate", "on_predict", "on_save", "on_train_end")


class Spare:
    """Factory of context managers that swallow exceptions. Only the first exception causes a warning."""

    def __init__(self, warn: Callable[[str], None] = lambda line: None) -> None:
        self._warn, self._told = warn, False

    @contextlib.contextmanager
    def __call__(self, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._told:
                self._told = True
                line = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
                self._warn(f"{problem} ({line}); said once")


def spare_from_trackers(trainer: Any) -> None:
    spare = Spare(trainer.console.warn)
    for callback in trainer.callback_handler.callbacks:
        if not type(callback).__module__.startswith("transformers.integrations"):
            continue
        for name in EVENTS:
            if name not in vars(callback):
                spared = spare(f"trackers: {type(callback).__name__} doesn't take all that is sent")
                setattr(callback, name, spared(getattr(callback, name)))


class Trackers:
    def __init__(
        self,
        report_to: Sequence[str],
        writer: Callable[[], Any] = lambda: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._names, self._writer, self._spare = list(report_to), writer, Spare(warn)
        self._for_trackio: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def flush(self) -> None:
        def send(name: str, trackio: Any) -> None:
            data, self._for_trackio = self._for_trackio, {}
            following = getattr(_current_run(trackio), "_next_step", None)  # private: the step of trackio's next log
            trackio.log(data, step=None if following is None else max(following - 1, 0))

        if self._for_trackio:
            self._each(("trackio",), send)

    def table(
        self, key: str, columns: Mapping[str, Sequence[Any]], pictures: Mapping[str, Sequence[Sequence[bytes]]]
    ) -> None:
        """Send a table to W&B and trackio. ``pictures`` maps a column to a list of encoded images for each row."""
        import pandas as pd
        from PIL import Image

        def send(name: str, tracker: Any) -> None:
            seen = {
                column: [[tracker.Image(Image.open(io.BytesIO(file))) for file in files] for files in rows]
                for column, rows in pictures.items()
            }
            self._log(name, {key: tracker.Table(dataframe=pd.DataFrame({**columns, **seen}))})

        self._each(("wandb", "trackio"), send)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        finite = {name: [*filter(math.isfinite, of_name)] for name, of_name in values.items()}
        finite = {name: of_name for name, of_name in finite.items() if of_name}

        def send(name: str, tracker: Any) -> None:
            if name != "tensorboard":
                return self._log(name, {key: tracker.Histogram(of_name) for key, of_name in finite.items()})
            for key, of_name in finite.items():
                tracker.add_histogram(key, np.asarray(of_name), step)

        self._each(("wandb", "trackio", "tensorboard"), send)

    def alarm(self, step: int, title: str, text: str, severity: str) -> None:
        def send(name: str, tracker: Any) -> None:
            if name == "tensorboard":
                return tracker.add_text("alarms", f"**{title}**: {text}", step)
            level = getattr(tracker.AlertLevel, ALERT_LEVELS[severity])
            tracker.alert(title=title, text=f"Step {step}: {text}", level=level)

        self._each(("wandb", "trackio", "tensorboard"), send)

    def _each(self, names: Sequence[str], send: Callable[[str, Any], None]) -> None:
        for name in (name for name in names if name in self._names):
            tracker = self._writer() if name == "tensorboard" else sys.modules.get(name)
            if tracker is not None and (name == "tensorboard" or _current_run(tracker) is not None):
                with self._spare(f"trackers: {name} didn't take all that was sent"):
                    send(name, tracker)

    def _log(self, name: str, data: dict[str, Any]) -> None:
        if name == "wandb":
            sys.modules[name].log(data, commit=False)
        else:
            self._for_trackio |= data


def _current_run(tracker: Any) -> Any:
    if hasattr(tracker, "context_vars"):
        return tracker.context_vars.current_run.get()
    return getattr(tracker, "run", None)

"""Tables, histograms and alarms for the trackers of ``report_to``, which transformers' callbacks start and feed.

    wandb, trackio   Table, Histogram, alert
    tensorboard      histograms, alarms as texts

wandb and trackio count steps by themselves, so this module must not begin a new step. For wandb, `commit=False` adds
data to the step of the metrics. For trackio, data waits until transformers' callback has sent the metrics (`flush`).
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...reporting.spare import Spare

ALERT_LEVELS = {"severe": "ERROR", "warning": "WARN", "note": "INFO"}


class Trackers:
    """Sends data to the trackers of ``report_to``. ``writer`` returns TensorBoard's; ``warn`` gets a line per error."""

    def __init__(
        self,
        report_to: Sequence[str],
        writer: Callable[[], Any] = lambda: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._names, self._writer, self._spare = list(report_to), writer, Spare(warn)
        self._waiting: dict[str, Any] = {}  # data for trackio that waits for `flush`

    def __bool__(self) -> bool:
        return bool(self._names)

    def flush(self) -> None:
        """Send the waiting data of a step to trackio. Call this after the step's metrics were sent."""
        for name, tracker in self._running("trackio"):
            if self._waiting:
                data, self._waiting = self._waiting, {}
                following = getattr(_current_run(tracker), "_next_step", None)  # trackio's next step, a private name
                with self._sending(name):
                    tracker.log(data, step=None if following is None else max(following - 1, 0))

    def table(
        self, key: str, columns: Mapping[str, Sequence[Any]], pictures: Mapping[str, Sequence[Sequence[bytes]]]
    ) -> None:
        """Send a table. ``columns`` has one value per row, ``pictures`` has a list of image files per row."""
        import pandas as pd
        from PIL import Image

        for name, tracker in self._running("wandb", "trackio"):
            with self._sending(name):
                seen = {
                    column: [[tracker.Image(Image.open(io.BytesIO(file))) for file in files] for files in rows]
                    for column, rows in pictures.items()
                }
                self._log(name, {key: tracker.Table(dataframe=pd.DataFrame({**columns, **seen}))})

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        finite = {name: [*filter(math.isfinite, of_name)] for name, of_name in values.items()}
        finite = {name: of_name for name, of_name in finite.items() if of_name}
        for name, tracker in self._running("wandb", "trackio"):
            with self._sending(name):
                self._log(name, {key: tracker.Histogram(of_name) for key, of_name in finite.items()})
        if (writer := self._tensorboard()) is not None:
            with self._sending("tensorboard"):
                for key, of_name in finite.items():
                    writer.add_histogram(key, np.asarray(of_name), step)

    def alarm(self, step: int, title: str, text: str, severity: str) -> None:
        for name, tracker in self._running("wandb", "trackio"):
            with self._sending(name):
                level = getattr(tracker.AlertLevel, ALERT_LEVELS[severity])
                tracker.alert(title=title, text=f"Step {step}: {text}", level=level)
        if (writer := self._tensorboard()) is not None:
            with self._sending("tensorboard"):
                writer.add_text("alarms", f"**{title}**: {text}", step)

    def _running(self, *names: str) -> Iterator[tuple[str, Any]]:
        for name in names:
            tracker = sys.modules.get(name)  # None if transformers' callback hasn't imported the tracker
            if name in self._names and tracker is not None and _current_run(tracker) is not None:
                yield name, tracker

    def _tensorboard(self) -> Any:
        return self._writer() if "tensorboard" in self._names else None

    def _log(self, name: str, data: dict[str, Any]) -> None:
        if name == "wandb":
            sys.modules[name].log(data, commit=False)
        else:
            self._waiting |= data

    def _sending(self, name: str) -> AbstractContextManager[None]:
        return self._spare(f"trackers: {name} didn't take all that was sent")


def _current_run(tracker: Any) -> Any:
    if hasattr(tracker, "context_vars"):
        return tracker.context_vars.current_run.get()
    return getattr(tracker, "run", None)

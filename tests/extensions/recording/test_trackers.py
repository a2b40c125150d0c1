"""Trackers get more than numbers: with TensorBoard and, where it is installed, trackio on this machine alone."""

from __future__ import annotations

import importlib.util
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny

from colograd import GRPOTrainer
from colograd.extensions.recording.trackers import Trackers

TRACKIO = importlib.util.find_spec("trackio") is not None


def fake_wandb(sent: list[Any]) -> Any:
    def log(data: dict[str, Any], commit: bool) -> None:
        assert not commit, "a step of wandb's begins with the metrics alone"
        sent.append(data)

    return types.SimpleNamespace(
        run=object(),
        log=log,
        Table=lambda dataframe: list(dataframe.columns),
        Histogram=sorted,
        AlertLevel=types.SimpleNamespace(ERROR="error", WARN="warn", INFO="info"),
        alert=lambda **given: sent.append(given),
    )


def test_only_trackers_that_run_and_are_asked_for_get_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    wandb = fake_wandb(sent)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    asked, nobody = Trackers(["wandb"]), Trackers([])
    assert asked and not nobody
    for trackers in (asked, nobody):
        trackers.table("completions", {"prompt": ["p"], "right": [1.0]}, {})
        trackers.histograms(3, {"train/rewards": [1.0, float("nan"), 0.0], "nothing": [float("nan")]})
        trackers.alarm(3, "all-truncated", "too long", severity="severe")
        trackers.alarm(4, "solved", "all is well", severity="note")
        trackers.flush()
    assert sent == [
        {"completions": ["prompt", "right"]},
        {"train/rewards": [0.0, 1.0]},
        {"title": "all-truncated", "text": "Step 3: too long", "level": "error"},
        {"title": "solved", "text": "Step 4: all is well", "level": "info"},
    ]
    wandb.run = None
    asked.histograms(4, {"train/rewards": [1.0]})
    assert len(sent) == 4, "its run has ended"


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    wandb = fake_wandb([])
    wandb.log = lambda *args, **kwargs: 1 / 0
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trackers = Trackers(["wandb"], warn=said.append)
    for step in range(3):
        trackers.histograms(step, {"train/rewards": [1.0]})
    assert said == ["trackers: wandb didn't take all that was sent (ZeroDivisionError: division by zero); said once"]


def test_a_tracker_that_is_not_installed_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    name = next(name for name in ("wandb", "trackio") if importlib.util.find_spec(name) is None)
    config = tiny.config(tmp_path, report_to=name)
    with pytest.raises(
        ValueError, match=f"`report_to` has '{name}', but the package {name} isn't installed: run `pip install"
    ):
        config.check_for_trainer()


@pytest.mark.engine
def test_a_run_reports_to_trackers_of_this_machine_without_a_network(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run reports to TensorBoard and to trackio with its default settings. Histograms and alarms arrive."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    asked: list[Any] = []
    find = socket.getaddrinfo

    def watched(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "localhost", "127.0.0.1", "::1", "0.0.0.0"):
            asked.append(host)
            raise OSError("there is no network")
        return find(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    names = ["tensorboard", *(["trackio"] if TRACKIO else [])]
    changes: dict[str, Any] = {"report_to": names, "project": "tiny", "run_name": "first", "max_steps": 3}
    config = tiny.config(tmp_path / "run", log_completions=True, max_completion_length=4, **changes)
    trainer = GRPOTrainer(str(tiny_model), [tiny.vowels, one], config, tiny.prompts(), tiny.prompts(2))
    try:
        trainer.train()
        trainer.evaluate()  # after trackio's run has ended
    finally:
        trainer.close()
    assert not asked
    _check_tensorboard(tmp_path / "tensorboard")
    if TRACKIO:
        _check_trackio()


def one(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def _check_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    found.Reload()
    tags = found.Tags()
    histograms = {"train/rewards", "train/completions/lengths", "train/rewards/one/values"}
    assert histograms <= set(tags["histograms"]) and "alarms/text_summary" in tags["tensors"]
    assert [(event.step, event.histogram_value.num) for event in found.Histograms("train/rewards")] == [
        (step, 16.0) for step in (1, 2, 3)
    ]


def _check_trackio() -> None:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("tiny", "first")
    found = {name: value for entry in logs for name, value in entry.items()}
    assert found["train/rewards"]["_type"] == "trackio.histogram" and sum(found["train/rewards"]["values"]) == 16
    assert found["completions"]["_type"] == "trackio.table" and 0 <= found["train/reward"] <= 2
    assert {alert["title"] for alert in SQLiteStorage.get_alerts("tiny")} >= {"all-truncated", "constant-reward"}
    for name in ("train/reward", "train/rewards"):
        assert [entry["step"] for entry in logs if name in entry] == [0, 1, 2], "trackio's count is that of the metrics"

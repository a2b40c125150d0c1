"""The decision whether a checkpoint may be written in parallel to training."""

from __future__ import annotations

from typing import Any

import psutil
from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy

from ..config import GRPOConfig
from ..runtime import process

SPARE = 0.8  # largest share of the free host memory for the copies


def why_in_foreground(config: GRPOConfig, callbacks: list[Any], optimizer_is_cut: bool, copies: int, held: int) -> str:
    """Return the reason why training must wait while a checkpoint is written; empty if it needn't wait.

    Args:
        config: the run's configuration.
        callbacks: the trainer's callbacks.
        optimizer_is_cut: whether the optimizer's state is written as named tensors.
        copies: bytes of this rank's part of a checkpoint.
        held: bytes of copies that an earlier save has allocated.
    """
    if not config.save_in_background:
        return "save_in_background is false"
    if config.push_to_hub and config.hub_strategy != HubStrategy.END:
        return f"each is pushed to the Hub (hub_strategy: {HubStrategy(config.hub_strategy).value})"
    if readers := [type(callback).__name__ for callback in callbacks if _reads_files(callback)]:
        return f"{readers[0]}.on_save may read it"
    if not config.save_only_model and not optimizer_is_cut:
        return f"the state of optim: {config.optim} isn't made of tensors alone"
    free, ranks = psutil.virtual_memory().available, process.local_world_size()
    if (missing := max(copies - held, 0) * ranks) > SPARE * free:
        return (
            f"its copy would take {missing / 2**30:,.1f} GiB of host memory, of which {free / 2**30:,.1f} GiB are free"
        )
    return ""


def _reads_files(callback: TrainerCallback) -> bool:
    """Return whether a callback may read the checkpoint's files in `on_save`."""
    if getattr(type(callback), "on_save", None) is TrainerCallback.on_save:
        return False
    switches = {"WandbCallback": "_log_model", "MLflowCallback": "_log_artifacts", "CometCallback": "_log_checkpoints"}
    name = type(callback).__name__
    if name == "TrackioCallback":  # its on_save does nothing
        return False
    if name == "WandbCallback":
        switch = getattr(callback, switches[name], None)
        return getattr(switch, "value", switch) == "checkpoint"
    return name not in switches or bool(getattr(callback, switches[name], True))

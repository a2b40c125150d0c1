"""Whether a checkpoint may be written beside the training, and if not, why."""

from __future__ import annotations

from typing import Any

import psutil
from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy

from ..config import GRPOConfig
from ..runtime import process

SPARE = 0.8  # share of the free host memory that the copies may take


def why_in_foreground(config: GRPOConfig, callbacks: list[Any], optimizer_is_cut: bool, copies: int, held: int) -> str:
    """Why training has to wait for the files; empty: it doesn't.

    Args:
        optimizer_is_cut: whether the optimizer's state is written as tensors by their names.
        copies: bytes of this rank's part of a checkpoint.
        held: bytes of them that are there from an earlier save.
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
    """Whether a callback does something at `on_save`, which for all we know is about the checkpoint's files."""
    if getattr(type(callback), "on_save", None) is TrainerCallback.on_save:
        return False
    switches = {"WandbCallback": "_log_model", "MLflowCallback": "_log_artifacts", "CometCallback": "_log_checkpoints"}
    name = type(callback).__name__
    if name == "TrackioCallback":  # does nothing there
        return False
    if name == "WandbCallback":
        switch = getattr(callback, switches[name], None)
        return getattr(switch, "value", switch) == "checkpoint"
    return name not in switches or bool(getattr(callback, switches[name], True))

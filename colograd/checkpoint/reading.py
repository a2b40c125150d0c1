"""What is read from a checkpoint is looked at first, whoever wrote it: one clear error, and no memory without bounds.

A manifest that fits says that files are what was written, not that a Colograd wrote them. Nothing is unpickled but
torch's own containers with ``weights_only``; those must say their sizes truly before torch unpacks them. Whatever a
loader still trips over is told with the file's name.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import TrainerState

from ..parallel.ranks import RankError, on_all_ranks

STATE_FILE = "trainer_state.json"
LARGEST_JSON = 2**30  # bytes; a log of many thousand steps has a few million
PICKLED = ("rng_state*.pth", "optimizer.pt", "scheduler.pt", "scaler.pt")
JSON = (STATE_FILE, "prompts.json", "lengths_*.json", "model.safetensors.index.json", "adapter_config.json")
COUNTS = ("global_step", "max_steps", "num_input_tokens_seen")  # of the trainer's state


@contextmanager
def reading(checkpoint: str | Path, what: str) -> Iterator[None]:
    """A body that reads ``what`` of a checkpoint. Whatever fails there is one error that names both.

    Raises:
        ValueError: the body failed. Its own ValueErrors stay as they are.
    """
    try:
        yield
    except (RankError, torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:
        if type(error) is ValueError:
            raise
        raise unreadable(checkpoint, what, error) from error


@contextmanager
def loading(checkpoint: str | Path, part: str) -> Iterator[None]:
    """A body that loads ``part`` of a checkpoint on all ranks (see `on_all_ranks`), with the errors of `reading`."""
    with on_all_ranks(f"loading {part}"), reading(checkpoint, part):
        yield


def unreadable(checkpoint: str | Path, what: str, error: BaseException | str) -> ValueError:
    """The error that says so."""
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = " ".join(str(reason).split())
    return ValueError(
        f"{what} of {str(checkpoint)!r} can't be read ({line[:300]}): it is damaged, or another program or version "
        "wrote it. Name another checkpoint."
    )


def look(checkpoint: str | Path) -> None:
    """Look at each file that a run goes on with, without loading its tensors.

    Raises:
        ValueError: the first that isn't what its name says.
    """
    folder = Path(checkpoint)
    checks = (
        *((path, _look_at_json) for pattern in JSON for path in folder.glob(pattern)),
        *((path, _look_at_pickled) for pattern in PICKLED for path in folder.glob(pattern)),
        *((path, _look_at_tensors) for path in folder.glob("*.safetensors")),
    )
    for path, check in checks:
        try:
            check(path)
        except (Exception, RecursionError) as error:
            raise unreadable(checkpoint, path.name, error) from error
    trainer_state(checkpoint)


def trainer_state(checkpoint: str | Path) -> TrainerState:
    """transformers' state of a run, each of its values of the type that it has there.

    Raises:
        ValueError: it isn't there, or isn't one.
    """
    path = Path(checkpoint) / STATE_FILE
    try:
        state = TrainerState.load_from_json(str(path))
        for name in COUNTS:
            value = getattr(state, name)
            if type(value) is not int or not 0 <= value < 2**53:
                raise TypeError(f"{name} is {value!r:.50}, and not a count")
        for name in ("epoch", "total_flos", "best_metric"):
            value = getattr(state, name)
            finite = name == "best_metric" or type(value) not in (int, float) or math.isfinite(value)
            if value is not None and (type(value) not in (int, float) or not finite):
                raise TypeError(f"{name} is {value!r:.50}, and not a number")
        if state.best_global_step is not None and type(state.best_global_step) is not int:
            raise TypeError(f"best_global_step is {state.best_global_step!r:.50}, and not a step")
        if not isinstance(state.best_model_checkpoint, str | None):
            raise TypeError("best_model_checkpoint is no path")
        if not (isinstance(state.log_history, list) and all(isinstance(entry, dict) for entry in state.log_history)):
            raise TypeError("log_history isn't a list of entries")
        if not isinstance(state.stateful_callbacks, dict):
            raise TypeError("stateful_callbacks aren't told by name")
    except (Exception, RecursionError) as error:
        raise unreadable(checkpoint, STATE_FILE, error) from error
    return state


def inside(folder: Path, name: Any) -> Path:
    """A file that another one of the folder names, such as a shard of the weights.

    Raises:
        ValueError: it isn't of the folder.
    """
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\0" in name:
        raise ValueError(f"{str(folder)!r} names {name!r:.100} as one of its files, which is none.")
    return folder / name


def _look_at_json(path: Path) -> None:
    if path.stat().st_size > LARGEST_JSON:
        raise TypeError(f"{path.stat().st_size:,} bytes")
    said = json.loads(path.read_text())
    if not isinstance(said, dict):
        raise TypeError(f"a {type(said).__name__}, and not an object")
    if path.name == "model.safetensors.index.json":
        for name in said["weight_map"].values():
            inside(path.parent, name)
    if path.name.startswith("lengths_") and not all(type(value) in (int, float) for value in said.values()):
        raise TypeError("lengths that are no numbers")


def _look_at_tensors(path: Path) -> None:
    with safe_open(path, framework="pt", device="cpu") as file:
        if path.name.startswith("optimizer-"):
            json.loads((file.metadata() or {})["param_groups"])


def _look_at_pickled(path: Path) -> None:
    """Whether torch's container holds what it says, and nothing packed: a small file could fill the memory."""
    with zipfile.ZipFile(path) as file:
        entries = file.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise TypeError("it is compressed, which torch.save doesn't do")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise TypeError("it says that it holds more than it has bytes")

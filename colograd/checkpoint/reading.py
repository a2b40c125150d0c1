"""Validate a checkpoint's files before they are loaded.

Checkpoints are untrusted input, because the manifest doesn't show who wrote the files. Only files in the format of
`torch.save` are unpickled, with ``weights_only``. The sizes in such a file's zip directory are checked first,
because a small file with false sizes could fill the memory."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import TrainerState
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..parallel.ranks import RankError, on_all_ranks
from ..sharding.weight_files import WeightFiles

STATE_FILE = "trainer_state.json"
LARGEST_JSON = 2**30  # maximum bytes of a JSON file; the log of many thousand steps needs a few million
PICKLED = ("rng_state*.pth", "optimizer.pt", "scheduler.pt", "scaler.pt")
JSON = (STATE_FILE, "prompts.json", "lengths_*.json", "model.safetensors.index.json", "adapter_config.json")
COUNTS = ("global_step", "max_steps", "num_input_tokens_seen")


@contextmanager
def reading(checkpoint: str | Path, what: str) -> Iterator[None]:
    """Convert an exception of the `with` block to a ValueError that names the file ``what`` and the checkpoint.

    An OSError, OutOfMemoryError or RankError stays unchanged. So does a ValueError, but not a subclass of it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RankError | torch.OutOfMemoryError | OSError) or type(error) is ValueError:
            raise
        raise unreadable(checkpoint, what, error) from error


@contextmanager
def loading(checkpoint: str | Path, part: str) -> Iterator[None]:
    with on_all_ranks(f"loading {part}"), reading(checkpoint, part):
        yield


def unreadable(checkpoint: str | Path, what: str, error: BaseException | str) -> ValueError:
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = " ".join(str(reason).split())
    return ValueError(
        f"{what} of {str(checkpoint)!r} can't be read ({line[:300]}): it is damaged, or another program or version "
        "wrote it. Use another checkpoint."
    )


def look(checkpoint: str | Path) -> None:
    """Raise a ValueError if a file of a checkpoint is unreadable or has unexpected content. Load no tensors."""
    folder = Path(checkpoint)
    for path in (path for pattern in (*JSON, *PICKLED, "*.safetensors") for path in folder.glob(pattern)):
        try:
            if path.suffix == ".json":
                if path.stat().st_size > LARGEST_JSON:
                    raise TypeError(f"the file has {path.stat().st_size:,} bytes, more than {LARGEST_JSON:,}")
                content = json.loads(path.read_text())
                if not isinstance(content, dict):
                    raise TypeError(f"the file must have a JSON object (not a {type(content).__name__})")
                if path.name == SAFE_WEIGHTS_INDEX_NAME:
                    WeightFiles(folder)
                numbers = content.values() if path.name.startswith("lengths_") else ()
                if not all(type(value) in (int, float) for value in numbers):
                    raise TypeError("every value (the mean completion length of a prompt) must be a number")
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt", device="cpu") as tensors:
                    if path.name.startswith("optimizer-"):
                        json.loads((tensors.metadata() or {})["param_groups"])
            else:  # a small torch file that is compressed, or claims false sizes, could fill the memory
                with zipfile.ZipFile(path) as file:
                    entries = file.infolist()
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                    raise TypeError("the file is compressed, but torch.save doesn't compress files")
                if sum(entry.file_size for entry in entries) > path.stat().st_size:
                    raise TypeError("the entries in the file claim more bytes than the file has")
        except (Exception, RecursionError) as error:
            raise unreadable(checkpoint, path.name, error) from error
    trainer_state(checkpoint)


def trainer_state(checkpoint: str | Path) -> TrainerState:
    path = Path(checkpoint) / STATE_FILE
    try:
        state = TrainerState.load_from_json(str(path))
        for name in COUNTS:
            value = getattr(state, name)
            if type(value) is not int or not 0 <= value < 2**53:
                raise TypeError(f"{name} ({value!r:.50}) must be an integer from 0 to 2**53 - 1")
        for name in ("epoch", "total_flos", "best_metric"):
            value = getattr(state, name)
            is_number = type(value) in (int, float) and (name == "best_metric" or math.isfinite(value))
            if value is not None and not is_number:
                raise TypeError(f"{name} ({value!r:.50}) must be a number")
        if state.best_global_step is not None and type(state.best_global_step) is not int:
            raise TypeError(f"best_global_step ({state.best_global_step!r:.50}) must be an integer")
        if not isinstance(state.best_model_checkpoint, str | None):
            raise TypeError("best_model_checkpoint must be a path")
        if not (isinstance(state.log_history, list) and all(isinstance(entry, dict) for entry in state.log_history)):
            raise TypeError("log_history must be a list of objects")
        if not isinstance(state.stateful_callbacks, dict):
            raise TypeError("stateful_callbacks must be an object")
    except (Exception, RecursionError) as error:
        raise unreadable(checkpoint, STATE_FILE, error) from error
    return state

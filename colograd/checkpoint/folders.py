"""Checkpoints that are whole or not there: written aside, flushed, renamed; and SIGTERM, which asks for one.

A folder named ``checkpoint-N`` that is written here is complete by construction.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from . import manifest
from .manifest import MANIFEST, Damaged, Manifest
from .reading import inside, reading

ASIDE = ".incomplete"
DISCARDED = ".discarded"
REPLACED = ".replaced"
REFUSED = "refused"
PROMPTS, SETTINGS = "prompts.json", "run_settings.json"
# What a checkpoint holds beside the model, as patterns of names.
STATE = (
    "optimizer*", "scheduler.pt", "rng_state*", "scaler.pt", "trainer_state.json", "training_args.bin",
    "lengths_*.json", "in_flight_*.records", "reference.safetensors", PROMPTS, SETTINGS, MANIFEST,
)  # fmt: skip


def aside_folder(run_dir: str | Path) -> Path:
    """Where a checkpoint is written before it counts. On the same file system, so that renaming is atomic."""
    return Path(run_dir) / ASIDE


def commit(aside: Path, final: Path, files: Manifest | None = None, keeps_old: bool = False) -> None:
    """Make the finished folder ``aside`` the checkpoint ``final``, surviving a crash of the machine right after.

    Args:
        files: what was written there, down to the disk; default: read and flushed now.
        keeps_old: what has the name now is damaged, and stays under another one.
    """
    if files is None:
        files = {name: manifest.entry_of(aside / name) for name in manifest.files_of(aside)}
        for name in files:
            flush(aside / name)
    (aside / MANIFEST).write_text(manifest.as_text(files))
    flush(aside / MANIFEST)
    for path in (*(path for path in aside.rglob("*") if path.is_dir()), aside):  # they hold the names
        flush(path)
    old = final.with_name(f"{REFUSED if keeps_old else REPLACED}-{final.name}")
    if final.exists():  # the same step saved twice (a save on request after a scheduled one)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)  # should the process die before the next line, `sweep` brings it back
    os.rename(aside, final)
    flush(final.parent)
    if not keeps_old:
        shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a checkpoint so that a half-deleted one never looks complete."""
    gone = folder.with_name(f"{DISCARDED}-{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(run_dir: str | Path) -> None:
    """Remove what an interrupted save or deletion left behind; bring back what was about to be replaced."""
    for replaced in Path(run_dir).glob(f"{REPLACED}-*"):
        final = replaced.with_name(replaced.name.removeprefix(f"{REPLACED}-"))
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, final)
    for leftover in Path(run_dir).glob(".*"):
        if leftover.name == ASIDE or leftover.name.startswith(DISCARDED):
            shutil.rmtree(leftover, ignore_errors=True)


def rotate(
    run_dir: str | Path,
    limit: int | None,
    best: str | None,
    newest: int | None = None,
    damaged: Collection[int] = (),
) -> None:
    """Keep the newest ``limit`` checkpoints, and the best one.

    Args:
        newest: the step of the one just written. Those of later steps are of a run that was gone back from: they go
            first.
        damaged: steps of damaged checkpoints. They don't count, and are kept for whoever looks into the damage.
    """
    if limit is None or limit <= 0:
        return
    found = [Path(p) for p in sort_checkpoints(output_dir=str(run_dir), best_model_checkpoint=best)]
    ordered = [folder for folder in found if step_of(folder) not in damaged]
    if newest is not None:
        ordered.sort(key=lambda folder: step_of(folder) <= newest)  # stable: otherwise as they were
    keep = max(limit, 2) if best is not None and ordered and Path(best) != ordered[-1] else limit
    for folder in ordered[:-keep]:
        if best is None or folder.resolve() != Path(best).resolve():
            discard(folder)


def step_of(folder: str | Path) -> int:
    """The step after which a checkpoint was written."""
    return int(str(folder).rpartition("-")[2])


def complete_steps(run_dir: str) -> list[int]:
    """The steps of the checkpoints that have a last file, be it of an older version; transformers itself may leave
    half-deleted ones."""
    found = sort_checkpoints(output_dir=run_dir, best_model_checkpoint=None) if os.path.isdir(run_dir) else []
    last = (MANIFEST, "trainer_state.json")
    return [step_of(path) for path in found if any(os.path.isfile(os.path.join(path, name)) for name in last)]


def check(folder: str | Path) -> bool:
    """Compare all files of a checkpoint with its manifest. False: it has none, as an older version wrote it.

    Raises:
        ValueError: one differs.
    """
    try:
        files = manifest.read(Path(folder))
        if files is not None:
            manifest.check(Path(folder), files)
    except Damaged as error:
        raise ValueError(f"{folder} is damaged: {error}.") from None
    return files is not None


def write_index(checkpoint: Path, names: Iterable[str]) -> None:
    """Say which tensors are the model's. Without it vLLM takes all files' tensors for weights, so also the optimizer's
    state (an error) and the reference (in the policy's place)."""
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, SAFE_WEIGHTS_NAME)}
    (checkpoint / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1))


def write_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    (checkpoint / SETTINGS).write_text(json.dumps(settings, indent=1))


def changed_settings(checkpoint: str, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(value in the checkpoint, value now) of the settings that differ, by name; empty of one that holds none."""
    path = Path(checkpoint) / SETTINGS
    if not path.is_file():  # an older version wrote it
        return {}
    with reading(checkpoint, SETTINGS):
        found = dict(json.loads(path.read_text()))
    pairs = {name: (found.get(name), settings.get(name)) for name in sorted(found.keys() | settings.keys())}
    return {name: (was, now) for name, (was, now) in pairs.items() if was != now}


def write_prompts(checkpoint: Path, state: dict[str, Any]) -> None:
    """What a streamed dataset had handed out by then, or a curriculum's record."""
    (checkpoint / PROMPTS).write_text(json.dumps(state))


def read_prompts(checkpoint: str, otherwise: str) -> dict[str, Any]:
    """The same again.

    Args:
        otherwise: what the run's dataset must have been if there is none: ``wasn't streamed``.

    Raises:
        ValueError: there is none.
    """
    path = Path(checkpoint) / PROMPTS
    if not path.is_file():
        raise ValueError(
            f"{checkpoint!r} is of a run whose dataset {otherwise}: its prompts came in another order, so that "
            "resuming can't go on where it stopped. Choose prompts as that run did, or set ignore_data_skip: true."
        )
    with reading(checkpoint, PROMPTS):
        state: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}, and not an object")
    return state


def float32_weights(checkpoint: str | Path) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a checkpoint's float32 weights, read one at a time; one file or shards, on the CPU.

    Weights in another precision aren't read, nor is a checkpoint without safetensors files.
    """
    whole, index = Path(checkpoint) / SAFE_WEIGHTS_NAME, Path(checkpoint) / SAFE_WEIGHTS_INDEX_NAME
    files = [whole] if whole.is_file() else []
    if not files and index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [inside(Path(checkpoint), name) for name in sorted(names)]
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as weights:
            for name in weights.keys():  # noqa: SIM118 (no dictionary)
                if weights.get_slice(name).get_dtype() == "F32":
                    yield name, weights.get_tensor(name)


def open_to_readers(folder: str | Path) -> None:
    """Give a folder's safetensors files the mode of any new file: the library makes them their owner's alone."""
    probe = Path(folder, f".mode-{os.getpid()}")
    probe.touch()  # as the umask can't be read without setting it, for all threads
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(probe.stat().st_mode)
    probe.unlink()


def flush(path: Path) -> None:
    """Have a file or a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

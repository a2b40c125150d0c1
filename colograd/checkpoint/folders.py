"""Commit, delete and check checkpoint folders, and handle the output folder of a run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import sort_checkpoints

from ..parallel.layout import RankLayout
from ..parallel.ranks import gather, on_all_ranks
from . import manifest
from .manifest import MANIFEST, Damaged, Manifest
from .reading import reading

ASIDE = ".incomplete"  # Folder of unfinished checkpoints, in the run's folder, so that renaming is atomic.
DISCARDED = ".discarded"
REPLACED = ".replaced"
REFUSED = "refused"
PROMPTS, SETTINGS = "prompts.json", "run_settings.json"
# Patterns of files in a checkpoint that don't belong to the model.
STATE = (
    "optimizer*", "scheduler.pt", "rng_state*", "scaler.pt", "trainer_state.json", "training_args.bin",
    "lengths_*.json", "in_flight_*.records", "reference.safetensors", PROMPTS, SETTINGS, MANIFEST,
)  # fmt: skip

# `_earlier` has an underscore so that transformers doesn't push this folder to the Hub.
EARLIER = "_earlier"
# A run's files that `set_aside` moves. recipe.yaml stays: it may be the user's file, and `_journal` has a copy.
RECORDS = ("_journal", "_report", "completions", "report.html", "README.md", "reward.png", "trainer_state.json")
CHECKPOINTS = ("checkpoint-*", "refused-checkpoint-*")
OF_MODEL = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "*processor_config.json", "training_args.bin",
)  # fmt: skip
SIGNS = ("_journal/step-*", "_report/*", "trainer_state.json", *CHECKPOINTS)


def commit(aside: Path, final: Path, files: Manifest, keeps_old: bool = False) -> None:
    """Write the manifest into the folder ``aside``, and rename the folder to ``final``.

    A checkpoint with a manifest counts as complete. So all its files must already be flushed to the disk."""
    (aside / MANIFEST).write_text(manifest.as_text(files))
    flush(aside / MANIFEST)
    for path in (*(path for path in aside.rglob("*") if path.is_dir()), aside):
        flush(path)
    old = final.with_name(f"{REFUSED if keeps_old else REPLACED}-{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)  # `sweep` undoes this rename if the process dies here, except with `keeps_old`
    os.rename(aside, final)
    flush(final.parent)
    if not keeps_old:
        shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a checkpoint. Rename the folder first, because a half-deleted checkpoint must never look complete."""
    discarded = folder.with_name(f"{DISCARDED}-{folder.name}")
    shutil.rmtree(discarded, ignore_errors=True)
    os.rename(folder, discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def sweep(run_dir: str | Path) -> None:
    """Delete the remains of interrupted saves and deletions.

    If a save was interrupted while it replaced a checkpoint, and no new checkpoint exists, restore the old one."""
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
    run_dir: str | Path, limit: int | None, best: str | None, newest: int | None = None, damaged: Collection[int] = ()
) -> None:
    """Delete checkpoints until ``limit`` are left, but keep the newest and the ``best`` one.

    ``newest`` is the step of the checkpoint that was just saved. Checkpoints with a higher step are deleted first,
    because the run was resumed before them and trains their steps again. ``damaged`` has the steps of damaged
    checkpoints, which aren't counted or deleted, so that users can examine them."""
    if limit is None or limit <= 0:
        return
    checkpoints = [Path(p) for p in sort_checkpoints(output_dir=str(run_dir), best_model_checkpoint=best)]
    ordered = [folder for folder in checkpoints if step_of(folder) not in damaged]
    if newest is not None:
        ordered.sort(key=lambda folder: step_of(folder) <= newest)
    kept = None if best is None else Path(best).resolve()
    keep = max(limit, 2) if kept is not None and ordered and kept != ordered[-1].resolve() else limit
    for folder in ordered[:-keep]:
        if folder.resolve() != kept:
            discard(folder)


def step_of(folder: str | Path) -> int:
    return int(str(folder).rpartition("-")[2])


def complete_steps(run_dir: str) -> list[int]:
    """Return the steps of the complete checkpoints: folders with a manifest or trainer_state.json.

    Older versions wrote no manifest."""
    paths = sort_checkpoints(output_dir=run_dir, best_model_checkpoint=None) if os.path.isdir(run_dir) else []
    last_files = (MANIFEST, "trainer_state.json")
    return [step_of(path) for path in paths if any(os.path.isfile(os.path.join(path, name)) for name in last_files)]


def check(folder: str | Path) -> bool:
    """Raise a ValueError if a checkpoint's files differ from its manifest.

    Return whether the checkpoint has a manifest. Older versions wrote none."""
    try:
        files = manifest.read(Path(folder))
        if files is not None:
            manifest.check(Path(folder), files)
    except Damaged as error:
        raise ValueError(f"{folder} is damaged: {error}. Use another checkpoint, or an undamaged copy.") from None
    return files is not None


def changed_settings(checkpoint: str, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return a dict with the pair (value in the checkpoint, present value) of each setting that differs."""
    path = Path(checkpoint) / SETTINGS
    if not path.is_file():  # older versions saved no settings
        return {}
    with reading(checkpoint, SETTINGS):
        saved = dict(json.loads(path.read_text()))
    pairs = {name: (saved.get(name), settings.get(name)) for name in sorted(saved.keys() | settings.keys())}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def read_prompts(checkpoint: str, otherwise: str) -> dict[str, Any]:
    """Read from a checkpoint the position in a streamed dataset, or a curriculum's record of prompts.

    Raise a ValueError if neither is saved. ``otherwise`` completes the error's words "a run whose dataset ..."."""
    path = Path(checkpoint) / PROMPTS
    if not path.is_file():
        raise ValueError(
            f"{checkpoint!r} is from a run whose dataset {otherwise}. That run's order of prompts was different, so "
            "this run can't continue at the checkpoint's position. Use the dataset settings of that run, or set "
            "`ignore_data_skip: true`."
        )
    with reading(checkpoint, PROMPTS):
        return dict(json.loads(path.read_text()))


def open_to_readers(folder: str | Path) -> None:
    """Give a folder's safetensors files the default permissions. `save_file` lets only the owner read a file."""
    probe = Path(folder, f".mode-{os.getpid()}")
    probe.touch()  # a new file has the default permissions; `os.umask` would change them for all threads
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(probe.stat().st_mode)
    probe.unlink()


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(run_dir: str | Path, model: str = "") -> Path | None:
    """Move an earlier run's files to a new folder in `_earlier`, and return this folder. None: no earlier run.

    If ``model`` is a folder, it stays in its place, because the new run starts from this model."""
    folder = Path(run_dir)
    if not any([*folder.glob(sign)] for sign in SIGNS):
        return None
    base = Path(model).resolve() if model and os.path.isdir(model) else None
    patterns = (*RECORDS, *CHECKPOINTS, *(OF_MODEL if base != folder.resolve() else ()))
    paths = dict.fromkeys(path for pattern in patterns for path in folder.glob(pattern) if path.resolve() != base)
    return move_aside(folder, [*paths])


def move_aside(run_dir: str | Path, paths: Sequence[Path]) -> Path:
    run_dir = Path(run_dir)
    name, number = time.strftime("%Y-%m-%d_%H%M%S"), 1
    while (aside := run_dir / EARLIER / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    for path in paths:
        target = aside / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return aside


def check_file_system(run_dir: str | Path) -> None:
    """Raise a ValueError if ``run_dir``'s file system can't rename folders or change files, e.g. a mounted bucket."""
    trial = Path(run_dir) / f".trial-{uuid.uuid4().hex}"
    renamed = trial.with_name(f"{trial.name}-renamed")
    need = "folders can't be made or renamed"
    try:
        trial.mkdir(parents=True)
        (trial / "file").write_bytes(b"ab")
        os.rename(trial, renamed)
        need = "an existing file can't be changed or lengthened"
        with open(renamed / "file", "r+b") as file:
            file.truncate(1)
            file.seek(0, os.SEEK_END)
            file.write(b"c")
        with open(renamed / "file", "ab") as file:
            file.write(b"d")
        if (renamed / "file").read_bytes() != b"acd":
            raise OSError("the file's bytes differ from the written bytes")
    except OSError as error:
        raise ValueError(
            f"output_dir is {str(run_dir)!r}, where {need} ({error.strerror or error}). Checkpoints and the rollout "
            "log need a file system that can rename folders and append to files. Set `output_dir` to a local folder, "
            "and copy checkpoints to a bucket from there."
        ) from None
    finally:
        for path in (trial, renamed):
            shutil.rmtree(path, ignore_errors=True)


def nodes_are_apart(run_dir: str | Path, layout: RankLayout) -> bool:
    """Return whether the path ``run_dir`` is a separate folder on each node. A collective."""
    if layout.nodes == 1:
        return False
    trial = gather(uuid.uuid4().hex)[0]
    marks = [Path(run_dir) / f".node-{node}-{trial}" for node in range(layout.nodes)]
    try:
        with on_all_ranks("writing into output_dir"):
            if layout.leads_node:
                marks[layout.node].parent.mkdir(parents=True, exist_ok=True)
                marks[layout.node].touch()
        # Test each path, because a network file system may give an outdated list of a folder's files.
        visible = gather([node for node, mark in enumerate(marks) if mark.exists()])
    finally:
        if layout.leads_node:
            with contextlib.suppress(OSError):
                marks[layout.node].unlink()
    all_nodes = list(range(layout.nodes))
    if all(nodes == all_nodes for nodes in visible):
        return False
    if all(nodes == [rank // layout.ranks_per_node] for rank, nodes in enumerate(visible)):
        return True
    sharing = "; ".join(f"node {n} sees files of nodes {visible[n * layout.ranks_per_node]}" for n in all_nodes)
    raise ValueError(
        f"output_dir is {str(run_dir)!r}. Some nodes share this folder, but not all nodes do ({sharing}). Set "
        "`output_dir` to a folder that all nodes share, or to a folder that is local on each node."
    )

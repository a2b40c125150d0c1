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

ASIDE = ".incomplete"  # In the run's folder, so that renaming is atomic.
DISCARDED = ".discarded"
REPLACED = ".replaced"
REFUSED = "refused"
PROMPTS, SETTINGS = "prompts.json", "run_settings.json"
# Files of a checkpoint that don't belong to the model.
STATE = (
    "optimizer*", "scheduler.pt", "rng_state*", "scaler.pt", "trainer_state.json", "training_args.bin",
    "lengths_*.json", "in_flight_*.records", "reference.safetensors", PROMPTS, SETTINGS, MANIFEST,
)  # fmt: skip

# Transformers doesn't push folders with a leading underscore to the Hub.
EARLIER = "_earlier"
# A run's files. recipe.yaml isn't listed: it may be the user's, and `_journal` has a copy.
RECORDS = ("_journal", "_report", "completions", "report.html", "README.md", "reward.png", "trainer_state.json")
CHECKPOINTS = ("checkpoint-*", "refused-checkpoint-*")
OF_MODEL = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "*processor_config.json", "training_args.bin",
)  # fmt: skip
SIGNS = ("_journal/step-*", "_report/*", "trainer_state.json", *CHECKPOINTS)


def commit(aside: Path, final: Path, files: Manifest, keeps_old: bool = False) -> None:
    """All files must be flushed to the disk already, because a folder ``checkpoint-N`` with a manifest is complete."""
    (aside / MANIFEST).write_text(manifest.as_text(files))
    flush(aside / MANIFEST)
    for path in (*(path for path in aside.rglob("*") if path.is_dir()), aside):
        flush(path)
    old = final.with_name(f"{REFUSED if keeps_old else REPLACED}-{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)  # `sweep` undoes this if the process dies before the next line
    os.rename(aside, final)
    flush(final.parent)
    if not keeps_old:
        shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path) -> None:
    """Rename a checkpoint first, because a half-deleted one must never look complete."""
    discarded = folder.with_name(f"{DISCARDED}-{folder.name}")
    shutil.rmtree(discarded, ignore_errors=True)
    os.rename(folder, discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def sweep(run_dir: str | Path) -> None:
    """Delete the remains of interrupted saves and deletions. Restore a checkpoint that has no replacement yet."""
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
    """Delete checkpoints until ``limit`` are left, except the newest and the ``best`` one.

    Checkpoints of steps after ``newest``, the step just saved, go first: a run that resumed at an earlier step trains
    these steps again. ``damaged`` checkpoints don't count and stay, so that the damage can be examined."""
    if limit is None or limit <= 0:
        return
    checkpoints = [Path(p) for p in sort_checkpoints(output_dir=str(run_dir), best_model_checkpoint=best)]
    ordered = [folder for folder in checkpoints if step_of(folder) not in damaged]
    if newest is not None:
        ordered.sort(key=lambda folder: step_of(folder) <= newest)
    keep = max(limit, 2) if best is not None and ordered and Path(best) != ordered[-1] else limit
    for folder in ordered[:-keep]:
        if best is None or folder.resolve() != Path(best).resolve():
            discard(folder)


def step_of(folder: str | Path) -> int:
    return int(str(folder).rpartition("-")[2])


def complete_steps(run_dir: str) -> list[int]:
    """Older versions wrote no manifest. Folders with neither file may be half-deleted by transformers."""
    paths = sort_checkpoints(output_dir=run_dir, best_model_checkpoint=None) if os.path.isdir(run_dir) else []
    last_files = (MANIFEST, "trainer_state.json")
    return [step_of(path) for path in paths if any(os.path.isfile(os.path.join(path, name)) for name in last_files)]


def check(folder: str | Path) -> bool:
    """Raise a ValueError if files differ from the manifest. Return whether there is one: older versions wrote none."""
    try:
        files = manifest.read(Path(folder))
        if files is not None:
            manifest.check(Path(folder), files)
    except Damaged as error:
        raise ValueError(f"{folder} is damaged: {error}. Use another checkpoint, or a copy.") from None
    return files is not None


def changed_settings(checkpoint: str, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (value in the checkpoint, present value) for each difference."""
    path = Path(checkpoint) / SETTINGS
    if not path.is_file():  # an older version wrote the checkpoint
        return {}
    with reading(checkpoint, SETTINGS):
        saved = dict(json.loads(path.read_text()))
    pairs = {name: (saved.get(name), settings.get(name)) for name in sorted(saved.keys() | settings.keys())}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def read_prompts(checkpoint: str, otherwise: str) -> dict[str, Any]:
    """Read a checkpoint's position in a streamed dataset, or a curriculum's record."""
    path = Path(checkpoint) / PROMPTS
    if not path.is_file():
        raise ValueError(
            f"{checkpoint!r} is from a run with a dataset that {otherwise}. That run's prompts had a different order, "
            "so this run can't continue there. Use that run's dataset settings, or set `ignore_data_skip: true`."
        )
    with reading(checkpoint, PROMPTS):
        return dict(json.loads(path.read_text()))


def open_to_readers(folder: str | Path) -> None:
    """Give the safetensors files in a folder the default permissions. `save_file` lets only the owner read them."""
    probe = Path(folder, f".mode-{os.getpid()}")
    probe.touch()  # reading the umask instead would change it for all threads
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
    """Move an earlier run's files to `_earlier`, except the folder ``model``, which the new run starts from."""
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
    """Mounted buckets often can't rename folders, or change files."""
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
        # A folder's listing may be outdated in a network file system.
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

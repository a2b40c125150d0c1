"""Find the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from ..parallel.layout import RankLayout
from ..parallel.ranks import gather, on_all_ranks
from ..reporting.console import Console
from . import manifest, reading
from .folders import complete_steps, step_of


def is_wanted(wanted: str | bool | None) -> bool:
    return wanted is not None and wanted is not False and str(wanted).lower() not in ("false", "none", "")


def is_search(wanted: str | bool | None) -> bool:
    return str(wanted).lower() in ("true", "auto")


def nothing_left(checkpoint: str, max_steps: int) -> str:
    return (
        f"{os.path.relpath(checkpoint)} is at the last of {max_steps} steps: nothing is left to train. Raise max_steps "
        "to train on. Set resume_from_checkpoint: false to start again; this run's files then move to _earlier/"
    )


def finished_checkpoint(wanted: str | bool | None, run_dir: str, max_steps: int) -> str | None:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        state = json.loads(Path(run_dir, reading.STATE_FILE).read_text())  # a run writes this file after the model
        if is_search(wanted) and 0 < max_steps <= state.get("global_step", 0) in complete_steps(run_dir):
            return os.path.join(run_dir, f"checkpoint-{state['global_step']}")
    return None


def search(
    wanted: str | bool | None, run_dir: str, layout: RankLayout, nodes_are_apart: bool, console: Console
) -> tuple[str | None, set[int]]:
    """Find the checkpoint that ``resume_from_checkpoint`` requests. A collective.

    Return the checkpoint's folder (None: the run starts anew), and the steps of damaged checkpoints. The values `true`
    and `auto` skip damaged checkpoints."""
    damaged: set[int] = set()
    with on_all_ranks("the search for a checkpoint"):
        steps = complete_steps(run_dir)
    rank_steps = gather(steps)
    node_steps = rank_steps[:: layout.ranks_per_node] if nodes_are_apart else rank_steps[:1]
    while True:
        with on_all_ranks("the search for a checkpoint"):
            checkpoint = find_resume(wanted, run_dir, node_steps, damaged)
        # Take rank 0's result: on a shared file system, ranks may see different folders for a moment.
        checkpoint = checkpoint if nodes_are_apart else gather(checkpoint)[0]
        damage = None if checkpoint is None else find_damage(checkpoint, layout, nodes_are_apart, console)
        if checkpoint is None or damage is None:
            return checkpoint, damaged
        if not is_search(wanted):
            raise ValueError(
                f"resume_from_checkpoint is {checkpoint!r}, a damaged checkpoint ({damage}). Use another checkpoint."
            )
        console.warn(f"checkpoints: {os.path.relpath(checkpoint)} is damaged and isn't taken: {damage}")
        damaged.add(step_of(checkpoint))


def find_resume(
    wanted: str | bool | None, run_dir: str, steps: Sequence[Sequence[int]] | None = None, damaged: Collection[int] = ()
) -> str | None:
    """Return the checkpoint to resume from: a given folder, or the newest complete one that all nodes have.

    ``steps``: each node's steps of complete checkpoints. None: read them from ``run_dir``."""
    if not is_wanted(wanted):
        return None
    text = str(wanted)
    if not is_search(wanted):
        if not os.path.isfile(os.path.join(text, reading.STATE_FILE)):
            raise ValueError(
                f"resume_from_checkpoint is {text!r}, which isn't a complete checkpoint (trainer_state.json is "
                "missing). Set `resume_from_checkpoint` to a checkpoint-N folder, `true`, or `auto`."
            )
        return text
    folders = [complete_steps(run_dir)] if steps is None else steps
    if common := set(folders[0]).intersection(*folders[1:]).difference(damaged):
        return os.path.join(run_dir, f"checkpoint-{max(common)}")
    if damaged:
        raise ValueError(
            f"resume_from_checkpoint is {text.lower()}, but all checkpoints are damaged ({run_dir!r}, steps "
            f"{', '.join(map(str, sorted(damaged)))}). Restore a checkpoint from a copy, or set "
            "`resume_from_checkpoint: false` to start anew."
        )
    if text.lower() == "true":
        on_nodes = f" that all {len(folders)} nodes have (steps per node: {folders})" if len(folders) > 1 else ""
        raise ValueError(
            f"`resume_from_checkpoint: true` needs a checkpoint, but {run_dir!r} holds no complete checkpoint"
            f"{on_nodes}. Use `auto` to start anew if there is no checkpoint."
        )
    return None


def find_damage(checkpoint: str, layout: RankLayout, nodes_are_apart: bool, console: Console) -> str | None:
    """Return the first damage that ranks find in a checkpoint's files, or None. A collective."""
    folder, damage, files = Path(checkpoint), None, None
    try:
        files = manifest.read(folder)
        if files is not None:
            ranks = layout.ranks_per_node if nodes_are_apart else layout.world_size
            manifest.check(folder, files, sorted(files)[layout.rank % ranks :: ranks])
        reading.look(folder)
    except (ValueError, OSError) as error:
        damage = str(error)
    reports = gather((damage, files is None))
    for number, (text, _) in enumerate(reports):
        if text:
            return text + (f" (rank {number} found it)" if len(reports) > 1 else "")
    if reports[0][1]:
        console.say(
            f"checkpoints: {os.path.relpath(checkpoint)} has no {manifest.MANIFEST} (an older version wrote it): it is "
            "taken unchecked"
        )
    return None

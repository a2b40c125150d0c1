"""Which checkpoint a run resumes from: the last complete one that isn't damaged, or the one that was named."""

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

WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_config.json",
)  # fmt: skip


def is_wanted(wanted: str | bool | None) -> bool:
    """Whether ``resume_from_checkpoint`` asks for a checkpoint."""
    return wanted is not None and wanted is not False and str(wanted).lower() not in ("false", "none", "")


def is_search(wanted: str | bool | None) -> bool:
    """Whether ``resume_from_checkpoint`` asks for the last checkpoint and names none."""
    return str(wanted).lower() in ("true", "auto")


def nothing_left(checkpoint: str, max_steps: int) -> str:
    """A line on a run that has trained all of its steps."""
    return (
        f"{os.path.relpath(checkpoint)} is at the last of {max_steps} steps: nothing is left to train. A larger "
        "max_steps trains on; resume_from_checkpoint: false trains anew, and this run's files move to _earlier/"
    )


def model_folder(folder: str) -> str | None:
    """The folder of a run's model: the run's own if the model there isn't older than the newest checkpoint (it is the
    best one with ``load_best_model_at_end``), else that checkpoint; None: there is neither. A model's folder is itself.
    """
    saved = any(os.path.isfile(os.path.join(folder, name)) for name in WEIGHTS)
    steps = complete_steps(folder)
    if saved and steps:  # a run that goes on after it had ended leaves an older model there
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            saved = json.loads(Path(folder, reading.STATE_FILE).read_text())["global_step"] >= max(steps)
    return folder if saved else os.path.join(folder, f"checkpoint-{max(steps)}") if steps else None


def finished_checkpoint(wanted: str | bool | None, run_dir: str, max_steps: int) -> str | None:
    """The last checkpoint of a run that has trained ``max_steps`` and saved its model; None: there may be work left."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        state = json.loads(Path(run_dir, reading.STATE_FILE).read_text())  # written after the model
        if is_search(wanted) and 0 < max_steps <= state.get("global_step", 0) in complete_steps(run_dir):
            return os.path.join(run_dir, f"checkpoint-{state['global_step']}")
    return None


def search(
    wanted: str | bool | None, run_dir: str, layout: RankLayout, nodes_are_apart: bool, console: Console
) -> tuple[str | None, set[int]]:
    """The checkpoint that ``resume_from_checkpoint`` asks for, and the steps of damaged ones. A collective.

    A damaged checkpoint is passed over with a warning if the last one is wanted.

    Args:
        nodes_are_apart: nodes share no file system: the last checkpoint that each of them has is taken.

    Raises:
        ValueError: the checkpoint that is named is missing or damaged, or all are damaged.
    """
    damaged: set[int] = set()
    with on_all_ranks("the search for a checkpoint"):
        steps = complete_steps(run_dir)
    of_ranks = gather(steps)
    of_nodes = of_ranks[:: layout.ranks_per_node] if nodes_are_apart else of_ranks[:1]
    while True:
        with on_all_ranks("the search for a checkpoint"):
            found = find_resume(wanted, run_dir, of_nodes, damaged)
        # Ranks may see different folders for a moment on a shared file system: rank 0 decides.
        found = found if nodes_are_apart else gather(found)[0]
        damage = None if found is None else find_damage(found, layout, nodes_are_apart, console)
        if found is None or damage is None:
            return found, damaged
        if not is_search(wanted):
            raise ValueError(f"resume_from_checkpoint is {found!r}, which is damaged: {damage}. Name another one.")
        console.warn(f"checkpoints: {os.path.relpath(found)} is damaged and isn't taken: {damage}")
        damaged.add(step_of(found))


def find_resume(
    wanted: str | bool | None,
    run_dir: str,
    steps: Sequence[Sequence[int]] | None = None,
    damaged: Collection[int] = (),
) -> str | None:
    """The folder of the checkpoint that ``resume_from_checkpoint`` asks for.

    ``True`` is the last one and an error if there is none; ``"auto"`` is the last one, or a fresh start; a path is
    itself.

    Args:
        steps: of the complete checkpoints in each folder that must hold it; default: in ``run_dir``.
        damaged: steps of checkpoints that aren't taken. A run that has no others doesn't start anew.

    Raises:
        ValueError: no such checkpoint.
    """
    if not is_wanted(wanted):
        return None
    text = str(wanted)
    if not is_search(wanted):
        if not os.path.isfile(os.path.join(text, reading.STATE_FILE)):
            raise ValueError(
                f"resume_from_checkpoint is {text!r}, which is no complete checkpoint (trainer_state.json is missing): "
                "give a checkpoint-N folder, `true`, or `auto`."
            )
        return text
    folders = [complete_steps(run_dir)] if steps is None else steps
    if common := set(folders[0]).intersection(*folders[1:]).difference(damaged):
        return os.path.join(run_dir, f"checkpoint-{max(common)}")
    if damaged:
        raise ValueError(
            f"resume_from_checkpoint is {text.lower()}, but each checkpoint in {run_dir!r} is damaged (steps "
            f"{', '.join(map(str, sorted(damaged)))}): bring one back from a copy, or start anew with another "
            "output_dir."
        )
    if text.lower() == "true":
        on_nodes = f" that all {len(folders)} nodes have (theirs: {folders})" if len(folders) > 1 else ""
        raise ValueError(
            f"resume_from_checkpoint is true, but {run_dir!r} holds no complete checkpoint{on_nodes}: use `auto` "
            "to start anew in that case."
        )
    return None


def find_damage(checkpoint: str, layout: RankLayout, nodes_are_apart: bool, console: Console) -> str | None:
    """The damage that any rank finds in a checkpoint; None: it is whole. A collective: ranks share the checksums."""
    folder, damage, files = Path(checkpoint), None, None
    try:
        files = manifest.read(folder)
        if files is not None:
            mine = manifest.shares(files, layout.rank, layout.world_size, layout.ranks_per_node, nodes_are_apart)
            manifest.check(folder, files, mine)
        reading.look(folder)
    except (ValueError, OSError) as error:
        damage = str(error)
    of_ranks = gather((damage, files is None))
    found = next(((number, text) for number, (text, _) in enumerate(of_ranks) if text), None)
    if found is not None:
        return found[1] + (f" (rank {found[0]} found it)" if len(of_ranks) > 1 else "")
    if of_ranks[0][1]:
        console.say(
            f"checkpoints: {os.path.relpath(checkpoint)} has no {manifest.MANIFEST} (an older version wrote it): it is "
            "taken unchecked"
        )
    return None

"""The store of rollouts in a run: the settings it holds for, when it begins anew, and when rounds are deleted."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..checkpoint.folders import complete_steps
from ..config import GRPOConfig
from ..config.advantages import AdvantageKnobs
from ..config.objective import ObjectiveKnobs
from ..config.reference import ReferenceKnobs
from ..config.sampling import SamplingKnobs
from ..data.images import ImageReader
from ..rollout.store import RolloutStore, digest_of

# What a round's completions and rewards, and the updates from them, depend on. A run with other values is another run.
# First which groups a round has and what is in them, then what is made of them.
OF_ROUNDS = (
    "seed", "data_seed", "num_generations", "prompts_per_step", "steps_per_generation", "num_iterations",
    "shuffle_dataset", "max_prompt_tokens", "overlong_prompts", "chat_template_path", "chat_template_kwargs",
    "max_tool_calling_iterations",
)  # fmt: skip
OF_TRAINING = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "max_steps", "num_train_epochs", "reward_weights", "reward_call",
    "disable_dropout", "cast_lm_head_to_fp32", "num_generations_eval", "temperature_eval",
    "max_completion_length_eval",
)  # fmt: skip
RECIPE = "recipe.yaml"  # in the journal's folder
GROUPS = (AdvantageKnobs, ObjectiveKnobs, ReferenceKnobs, SamplingKnobs)
# Those that a run which trains what is recorded must have, too.
OF_GROUPS = frozenset((*OF_ROUNDS, *(field.name for field in dataclasses.fields(SamplingKnobs)), "reward_funcs"))


def journal_of(args: GRPOConfig, reward_names: Sequence[str], reader: ImageReader | None = None) -> RolloutStore | None:
    """This rank's store; None without a journal, and on ranks that follow another one's engine."""
    if not args.keeps_journal or args.layout.engine_place:
        return None
    return RolloutStore(str(args.output_dir), args.layout.rank, settings_of(args, reward_names), reader)


def settings_of(args: GRPOConfig, reward_names: Sequence[str]) -> dict[str, Any]:
    names = [*OF_ROUNDS, *OF_TRAINING, *(field.name for group in GROUPS for field in dataclasses.fields(group))]
    settings: dict[str, Any] = {name: getattr(args, name) for name in dict.fromkeys(names)}
    if args.router_replay:  # else rounds are what they were before there was such a setting
        settings["router_replay"] = True
    return settings | {"reward_funcs": list(reward_names)}


def open_journal(journal: RolloutStore, resumes: bool, step: int, is_writer: bool) -> str:
    """Prepare the store for a run that starts at ``step``; returns a line for people.

    Args:
        resumes: the run goes on from its folder's records; else these are put aside.
        is_writer: this rank writes what its node writes once.

    Raises:
        JournalError: the records were made with other settings.
    """
    journal.start_at_checkpoint()
    if not resumes:
        moved = journal.set_aside() if is_writer else None
        return f"journal: what an earlier run recorded here is now in {moved}" if moved else ""
    journal.check_settings(step)
    rounds = [recorded for recorded in journal.rounds() if recorded >= step and journal.has_groups(recorded)]
    if not rounds:
        return ""
    return (
        f"journal: {len(rounds)} round(s) are recorded, from step {rounds[0]} to {rounds[-1]}: their groups are "
        "neither sampled nor scored again"
    )


def begin_records(journal: RolloutStore | None, step: int, model: torch.nn.Module, evaluation: str) -> str:
    """Begin a round's records, or an evaluation's; returns a line on what is wrong with them, or was with the last
    ones.
    """
    if journal is None:
        return ""
    problem = journal.problem
    journal.begin(step, digest_of(model), evaluation)
    return problem or journal.problem or journal.warning


def end_records(journal: RolloutStore | None) -> str:
    """End the last round's records; returns a line on what is wrong with them."""
    if journal is None:
        return ""
    journal.close()
    problem, journal.problem = journal.problem, ""
    return problem


def keep_recipe(journal: RolloutStore, recipe: str | None) -> str:
    """Write the run's recipe (YAML, None for a script) beside its records, for `colograd replay`; returns a line on why
    not.
    """
    path = journal.folder / RECIPE
    try:
        if recipe is None:
            path.unlink(missing_ok=True)  # of an earlier run
            return ""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        aside.write_text(recipe, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        return f"journal: {path} can't be written ({error}): `colograd replay` will need the recipe (--config)"
    return ""


def prune_journal(journal: RolloutStore, newest: int, refused: Collection[int]) -> None:
    """Delete the rounds that the last two checkpoints have made needless: of two, since the last may be damaged."""
    found = complete_steps(str(journal.folder.parent))
    steps = [step for step in found if step <= newest and step not in refused]
    if len(steps) > 1:
        journal.prune(before=steps[-2])

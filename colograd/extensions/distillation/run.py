"""Checks of a run with teachers: the dataset's column that names each prompt's teacher, and a run without rewards."""

from __future__ import annotations

from ...batch import TEACHER
from ...config import GRPOConfig
from ...data import PromptDataset
from ...data.columns import columns_of
from ...training.preparation import Prompts


def prompt_columns(config: GRPOConfig) -> tuple[str, ...]:
    """Return the dataset column that names each prompt's teacher. Empty, unless the run has several teachers."""
    return (TEACHER,) if config.names_teachers else ()


def check_teacher_column(prompts: Prompts, args: GRPOConfig) -> None:
    """Raise a ValueError if, with several teachers, the dataset has no column of teachers or names an unknown one."""
    if not args.names_teachers:
        return
    known = ", ".join(args.teachers)
    if not isinstance(prompts, PromptDataset) or TEACHER not in columns_of(prompts.dataset):
        raise ValueError(
            f"teacher_model_name_or_path names several teachers ({known}), but the dataset "
            f"{'is a stream' if not isinstance(prompts, PromptDataset) else f'has no column {TEACHER!r}'}: give a "
            f"dataset with a column {TEACHER!r} that names each prompt's teacher, or is empty for a prompt without one."
        )
    strange = {str(name) for name in prompts.dataset[TEACHER] if name} - {*args.teachers}
    if strange:
        raise ValueError(
            f"The dataset's column {TEACHER!r} names {min(strange)!r}, but teacher_model_name_or_path has {known}: "
            "name one of these teachers, or leave the column empty."
        )


def goes_without_rewards(args: GRPOConfig) -> bool:
    """Return whether a run without reward functions is possible, because the run has a teacher. Raise a ValueError if
    another setting of the run needs rewards."""
    if not args.distils:
        return False
    if args.dynamic_sampling:
        raise ValueError(
            "dynamic_sampling is true, but there is no reward function to select prompts by: set dynamic_sampling: "
            "false, or give reward_funcs."
        )
    best = str(args.metric_for_best_model or "").removeprefix("eval_")
    if best == "reward" or best.startswith(("rewards/", "pass@")):
        raise ValueError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, but there is no reward function: set "
            "metric_for_best_model: teacher_kl and greater_is_better: false."
        )
    return True

"""Checks of a run with teachers: conflicts of settings, the dataset's column of teachers, a run without rewards."""

from __future__ import annotations

from typing import Any

from ...batch import TEACHER
from ...config import GRPOConfig
from ...config.conflicts import ANY, SET, UNSET, Conflict, When, equal, other_than

SETTING = "teacher_model_name_or_path"
SEVERAL = When("of several teachers", lambda models: isinstance(models, dict))
MALFORMED = When("an empty mapping, or one of other things than texts", lambda models: (
    isinstance(models, dict) and not (models and all(w and isinstance(w, str) for pair in models.items() for w in pair))
))  # fmt: skip
CONFLICTS = (
    Conflict(
        SETTING, MALFORMED, "", ANY,
        "must map a teacher's name to a model", "write {math: Qwen/Qwen3-8B, code: ./my_coder}, say",
    ),
    *(Conflict(name, SET, SETTING, UNSET, "there is no teacher", f"set teacher_model_name_or_path, or remove {name}")
      for name in ("teacher_model_revision", "teacher_model_init_kwargs", "offload_teacher")),
    Conflict(
        "distillation_weight", When("0 or below", lambda weight: not weight > 0), SETTING, SET,
        "it must be positive", "raise it, or remove teacher_model_name_or_path",
    ),
    Conflict(
        SETTING, SEVERAL, "distillation_kl", other_than("sampled"),
        "that is computed with one teacher's logits", "set distillation_kl: sampled, or choose one teacher",
    ),
    Conflict(
        SETTING, SEVERAL, "sharding", equal("fsdp"),
        "several teachers can't be cut by rows, as some ranks may have no prompt for a teacher that other ranks run",
        "set offload_teacher: true, or sharding: gradients",
        lambda settings: settings.cuts_weights and not settings.offload_teacher,
    ),
)  # fmt: skip


def prompt_columns(config: GRPOConfig) -> tuple[str, ...]:
    return (TEACHER,) if isinstance(config.teacher_model_name_or_path, dict) else ()


def check_teacher_column(prompts: Any, args: GRPOConfig) -> None:
    from ...data import PromptDataset  # Imported here, because checks of settings must not load data libraries.
    from ...data.columns import columns_of

    if not isinstance(args.teacher_model_name_or_path, dict):
        return
    known = ", ".join(args.teachers)
    if not isinstance(prompts, PromptDataset) or TEACHER not in columns_of(prompts.dataset):
        raise ValueError(
            f"teacher_model_name_or_path maps names to teachers ({known}), but the dataset "
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
    """Return whether a teacher makes reward functions unnecessary. If so, raise for settings that need rewards."""
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

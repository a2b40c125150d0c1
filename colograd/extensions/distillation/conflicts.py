"""Settings that can't be combined with a teacher model, or that need a teacher."""

from __future__ import annotations

from typing import Any

from ...config.conflicts import ANY, SET, UNSET, Conflict, When, equal, other_than

TEACHER = "teacher_model_name_or_path"
SEVERAL = When("of several teachers", lambda models: isinstance(models, dict))


def _is_no_mapping(models: Any) -> bool:
    """Return whether a mapping of several teachers is invalid: empty, or with keys or values that aren't texts."""
    if not isinstance(models, dict):
        return False
    return not models or not all(word and isinstance(word, str) for pair in models.items() for word in pair)


CONFLICTS = (
    Conflict(
        TEACHER, When("an empty mapping, or one of other things than texts", _is_no_mapping), "", ANY,
        "must map a teacher's name to a model", "write {math: Qwen/Qwen3-8B, code: ./my_coder}, say",
    ),
    *(
        Conflict(
            name, SET, TEACHER, UNSET, "there is no teacher", f"set teacher_model_name_or_path, or remove {name}"
        )
        for name in ("teacher_model_revision", "teacher_model_init_kwargs", "offload_teacher")
    ),
    Conflict(
        "distillation_weight", When("0 or below", lambda weight: not weight > 0), TEACHER, SET,
        "it must be positive", "raise it, or remove teacher_model_name_or_path",
    ),
    Conflict(
        TEACHER, SEVERAL, "distillation_kl", other_than("sampled"),
        "that is computed with one teacher's logits", "set distillation_kl: sampled, or choose one teacher",
    ),
    Conflict(
        TEACHER, SEVERAL, "sharding", equal("fsdp"),
        "several teachers can't be cut, as a rank may have no prompt of one that others ask",
        "set offload_teacher: true, or sharding: gradients",
        lambda settings: settings.cuts_weights and not settings.offload_teacher,
    ),
)  # fmt: skip

"""On-policy distillation: a teacher scores the policy's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .knob import distillation


@dataclass
class DistillationKnobs:
    """Distillation."""

    teacher_model_name_or_path: dict[str, Any] | str | None = distillation(
        None,
        "A model (Hub id, folder or adapter's folder) that the policy learns from on its own completions; reward "
        "functions are then optional. Or a mapping of names to models; the dataset's column `teacher` names each "
        "prompt's. See docs/guide/distillation.md.",
    )
    teacher_model_revision: str | None = distillation(None, "Branch, tag or commit of a teacher from the Hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = distillation(
        None,
        "Keyword arguments of the teacher's `from_pretrained`; `dtype` defaults to the policy's, `load_in_4bit: "
        "true` quantises.",
    )
    distillation_kl: str = distillation(
        "sampled",
        "`sampled`: add each token's log teacher - log policy probability to its advantage. `exact`: add the "
        "reverse KL divergence over the vocabulary to the loss. `top_k`: the same over the teacher's most "
        "probable tokens, all others counted as one.",
        one_of=("sampled", "exact", "top_k"),
    )
    distillation_top_k: int = distillation(
        64, "Teacher's tokens that are kept per sampled token, with `top_k`.", at_least=1
    )
    distillation_weight: float = distillation(1.0, "Coefficient of the teacher's term.")
    offload_teacher: bool = distillation(
        False,
        "On a GPU, keep the teacher in pinned host memory between generations. No effect on a CPU.",
    )

    @property
    def teachers(self) -> dict[str, str]:
        """The models by their names; a single teacher has the empty name."""
        models = self.teacher_model_name_or_path
        return {} if models is None else models if isinstance(models, dict) else {"": models}

    @property
    def names_teachers(self) -> bool:
        """Whether there are several teachers. The dataset then names each prompt's."""
        return isinstance(self.teacher_model_name_or_path, dict)

    @property
    def distils(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_model_name_or_path is not None

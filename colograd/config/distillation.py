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
        "A model (a Hub id, a folder, or an adapter's folder) towards which the policy is trained on its own "
        "completions; reward functions are optional then. Or a mapping of names to such models, of which the dataset's "
        "column `teacher` names each prompt's. See docs/guide/distillation.md.",
    )
    teacher_model_revision: str | None = distillation(None, "Branch, tag or commit of a teacher from the Hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = distillation(
        None,
        "Keyword arguments of the teacher's `from_pretrained`; `dtype` is by default the policy's, `load_in_4bit: "
        "true` quantises it.",
    )
    distillation_kl: str = distillation(
        "sampled",
        "How the policy is brought closer: each token's log teacher - log policy probability is added to its advantage "
        "(`sampled`), or the reverse KL divergence over the whole vocabulary is added to the loss (`exact`), or that "
        "over the teacher's most probable tokens and all the rest as one (`top_k`).",
        one_of=("sampled", "exact", "top_k"),
    )
    distillation_top_k: int = distillation(
        64, "Tokens of the teacher that are kept for each one sampled, with `top_k`.", at_least=1
    )
    distillation_weight: float = distillation(1.0, "Coefficient of that term beside the rewards' part.")
    offload_teacher: bool = distillation(
        False,
        "On a GPU, keep the teacher in pinned host memory but while it scores a generation. Does nothing on a CPU.",
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

"""On-policy distillation: a teacher scores what the policy samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .knob import knob, one_of


@dataclass
class DistillationKnobs:
    """Distillation."""

    teacher_model_name_or_path: str | None = knob(
        None,
        "A model (a Hub id, a folder, or an adapter's folder) towards which the policy is trained on its own "
        "completions; reward functions are optional then. See docs/guide/distillation.md.",
    )
    teacher_model_revision: str | None = knob(None, "Branch, tag or commit of a teacher from the Hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = knob(
        None,
        "Keyword arguments of the teacher's `from_pretrained`; `dtype` is by default the policy's, `load_in_4bit: "
        "true` quantises it.",
    )
    distillation_kl: str = knob(
        "sampled",
        "How the policy is brought closer: each token's log teacher - log policy probability is added to its advantage "
        "(`sampled`), or the reverse KL divergence over the whole vocabulary is added to the loss (`exact`).",
    )
    distillation_weight: float = knob(1.0, "Coefficient of that term beside the rewards' part.")
    offload_teacher: bool = knob(
        False,
        "On a GPU, keep the teacher in pinned host memory but while it scores a generation. Does nothing on a CPU.",
    )

    def _check_distillation(self) -> None:
        one_of(self, "distillation_kl", ("sampled", "exact"))
        if self.teacher_model_name_or_path is None:
            for name in ("teacher_model_revision", "teacher_model_init_kwargs", "offload_teacher"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, but there is no teacher: set teacher_model_name_or_path, "
                        f"or remove {name}."
                    )
            return
        if not self.distillation_weight > 0:
            raise ValueError(
                f"distillation_weight is {self.distillation_weight}, but must be positive: raise it, or remove "
                "teacher_model_name_or_path."
            )
        sampled = self.distillation_kl == "sampled"
        whole = {"importance_sampling_level": "sequence", "loss_type": "gmpo"}  # one ratio for a completion's tokens
        for name, value in whole.items() if sampled else ():
            if getattr(self, name) == value:
                raise ValueError(
                    f"{name} is {value!r} and distillation_kl 'sampled', but with one ratio per completion no token "
                    f"answers for its own advantage: set distillation_kl: exact, or another {name}."
                )

    @property
    def distils(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_model_name_or_path is not None

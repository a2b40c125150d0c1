"""On-policy distillation: a teacher scores the policy's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .knob import at_least, knob, one_of


@dataclass
class DistillationKnobs:
    """Distillation."""

    teacher_model_name_or_path: dict[str, Any] | str | None = knob(
        None,
        "A model (a Hub id, a folder, or an adapter's folder) towards which the policy is trained on its own "
        "completions; reward functions are optional then. Or a mapping of names to such models, of which the dataset's "
        "column `teacher` names each prompt's. See docs/guide/distillation.md.",
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
        "(`sampled`), or the reverse KL divergence over the whole vocabulary is added to the loss (`exact`), or that "
        "over the teacher's most probable tokens and all the rest as one (`top_k`).",
    )
    distillation_top_k: int = knob(64, "Tokens of the teacher that are kept for each one sampled, with `top_k`.")
    distillation_weight: float = knob(1.0, "Coefficient of that term beside the rewards' part.")
    offload_teacher: bool = knob(
        False,
        "On a GPU, keep the teacher in pinned host memory but while it scores a generation. Does nothing on a CPU.",
    )

    def _check_distillation(self) -> None:
        one_of(self, "distillation_kl", ("sampled", "exact", "top_k"))
        at_least(self, 1, "distillation_top_k")
        if self.teacher_model_name_or_path is None:
            for name in ("teacher_model_revision", "teacher_model_init_kwargs", "offload_teacher"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, but there is no teacher: set teacher_model_name_or_path, "
                        f"or remove {name}."
                    )
            return
        given = self.teacher_model_name_or_path
        if isinstance(given, dict):
            self._check_teachers(given)
        if not self.distillation_weight > 0:
            raise ValueError(
                f"distillation_weight is {self.distillation_weight}, but must be positive: raise it, or remove "
                "teacher_model_name_or_path."
            )

    def _check_teachers(self, given: dict[str, Any]) -> None:
        bad = [name for name, path in given.items() if not (name and isinstance(name, str) and isinstance(path, str))]
        if not given or bad:
            raise ValueError(
                f"teacher_model_name_or_path is {given!r}, but must map a teacher's name to a model: "
                "{math: Qwen/Qwen3-8B, code: ./my_coder}, say."
            )
        if self.distillation_kl != "sampled":
            raise ValueError(
                f"teacher_model_name_or_path names several teachers and distillation_kl is {self.distillation_kl!r}, "
                "which is computed with one teacher's logits: set distillation_kl: sampled, or choose one teacher."
            )
        if getattr(self, "cuts_weights", False) and not self.offload_teacher:
            raise ValueError(
                "teacher_model_name_or_path names several teachers, which sharding: fsdp can't cut, as a rank may have "
                "no prompt of one that others ask: set offload_teacher: true, or sharding: gradients."
            )

    @property
    def teachers(self) -> dict[str, str]:
        """The models by their names; a single teacher has the empty name."""
        given = self.teacher_model_name_or_path
        return {} if given is None else given if isinstance(given, dict) else {"": given}

    @property
    def names_teachers(self) -> bool:
        """Whether there are several teachers. The dataset then names each prompt's."""
        return isinstance(self.teacher_model_name_or_path, dict)

    @property
    def distils(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_model_name_or_path is not None

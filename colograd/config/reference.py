"""The KL term, and the reference model that it compares the policy with."""

from __future__ import annotations

from dataclasses import dataclass

from .knob import at_least, knob


@dataclass
class ReferenceKnobs:
    """The KL term and its reference model."""

    beta: float = knob(0.0, "KL coefficient; 0: no KL term and no reference model. See docs/reference.md.")
    use_bias_correction_kl: bool = knob(
        True, "Multiply the KL term by the importance ratio: its gradient is then unbiased."
    )
    sync_ref_model: bool = knob(
        False, "Mix the policy into the reference model every `ref_model_sync_steps` steps (TR-DPO)."
    )
    ref_model_mixup_alpha: float = knob(0.6, "Share of the policy in that mixture; 1 replaces the reference.")
    ref_model_sync_steps: int = knob(512, "Optimizer steps between two mixtures.")
    offload_reference: bool = knob(
        False,
        "On a GPU, keep the reference model in pinned host memory but while its log-probabilities are computed. Does "
        "nothing on a CPU, nor for LoRA, which has no second model.",
    )

    def _check_reference(self) -> None:
        at_least(self, 0, "beta")
        at_least(self, 1, "ref_model_sync_steps")
        if self.sync_ref_model and self.beta == 0:
            raise ValueError(
                "sync_ref_model is true, but beta is 0, so that there is no reference model: set beta, or remove "
                "sync_ref_model."
            )
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise ValueError(
                f"ref_model_mixup_alpha is {self.ref_model_mixup_alpha}, but is the policy's share of a mixture, in "
                "(0, 1]: 1 replaces the reference by the policy."
            )

"""The objective: the loss, its entropy terms, and the correction for a sampler whose probabilities differ."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..runtime.importing import is_import_path
from .knob import at_least, knob, one_of
from .sampling import SamplingKnobs

LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass
class ObjectiveKnobs(SamplingKnobs):
    """The objective."""

    loss_type: str = knob(
        "dapo",
        "`dapo`, `grpo`, `bnpo`, `dr_grpo`, `luspo`, `cispo`, `sapo`, `vespo`, or the import path of a class of your "
        "own; see docs/losses.md.",
    )
    importance_sampling_level: str = knob(
        "token", "The importance ratio of each `token`, or its mean over the `sequence` (GSPO)."
    )
    epsilon: float = knob(0.2, "Lower clip range of the importance ratio.")
    epsilon_high: float | None = knob(
        None, "Upper clip range; default `epsilon`. Of `cispo`: the bound of the ratio itself (5.0 is usual)."
    )
    delta: float | None = knob(None, "Upper bound of the ratio in two-sided clipping.")
    sapo_temperature_pos: float = knob(1.0, "`sapo`: how fast the gate closes, for positive advantages.")
    sapo_temperature_neg: float = knob(1.05, "`sapo`: the same, for the others.")
    vespo_k_pos: float = knob(2.0, "`vespo`: how much small ratios are weighted down, for advantages from 0 up.")
    vespo_lambda_pos: float = knob(3.0, "`vespo`: how much large ratios are, for the same.")
    vespo_k_neg: float = knob(3.0, "`vespo`: as `vespo_k_pos`, for negative advantages.")
    vespo_lambda_neg: float = knob(2.0, "`vespo`: as `vespo_lambda_pos`, for negative advantages.")
    top_entropy_quantile: float = knob(
        1.0,
        "Share of the step's tokens, those of highest entropy, that the policy loss takes; 1 is all. A step of several "
        "micro-batches then needs one more forward.",
    )
    entropy_coef: float = knob(0.0, "Coefficient of the mean entropy of the step's tokens in the loss (a bonus).")
    use_adaptive_entropy: bool = knob(
        False,
        "Move `entropy_coef` after each step, up where the entropy is at most `entropy_target` and down elsewhere; it "
        "applies only where the step before was at or below the target.",
    )
    entropy_coef_min: float = knob(0.0, "Lower bound of the adaptive coefficient.")
    entropy_coef_max: float = knob(1.0, "Upper bound of the adaptive coefficient.")
    entropy_coef_delta: float = knob(0.005, "By how much it moves in a step.")
    entropy_target: float = knob(0.2, "Mean entropy of a token, in nats, below which the adaptive bonus acts.")
    router_aux_loss_coef: float | None = knob(
        None,
        "Coefficient of a mixture of experts' load-balancing loss; default: the model's own (0.001, mostly). With 0, "
        "groups without a reward difference aren't trained.",
    )
    vllm_importance_sampling_correction: bool = knob(
        True, "Weigh the loss by trainer over sampler probability, to undo their mismatch."
    )
    vllm_importance_sampling_mode: str = knob(
        "sequence_mask", "`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`, as in TRL."
    )
    vllm_importance_sampling_clip_max: float | None = knob(3.0, "Upper bound of that ratio.")
    vllm_importance_sampling_clip_min: float | None = knob(None, "Lower bound of that ratio.")
    off_policy_mask_threshold: float | None = knob(
        None,
        "Leave out completions with a negative advantage whose mean log sampler - log policy probability is above this "
        "(DeepSeek-V3.2); 0.5, say.",
    )

    def _resolve_objective(self) -> None:
        self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        at_least(self, 0, "epsilon", "epsilon_high")
        one_of(self, "importance_sampling_level", ("token", "sequence"))
        if self.loss_type not in LOSSES and not is_import_path(self.loss_type):
            near = difflib.get_close_matches(self.loss_type, LOSSES, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"loss_type {self.loss_type!r} isn't one of the built-in ones ({', '.join(LOSSES)}): the nearest is "
                f"{near!r}. For a loss of your own give its import path: package.module:Class."
            )
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be positive: 1.0 is usual.")
        at_least(self, 0, "delta", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg")
        at_least(self, 0, "entropy_coef_delta", "router_aux_loss_coef")
        if not 0 <= self.top_entropy_quantile <= 1:
            raise ValueError(
                f"top_entropy_quantile is {self.top_entropy_quantile}, but must be a share from 0 to 1: 1.0 turns it "
                "off."
            )
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min ({self.entropy_coef_min}) must be at most entropy_coef_max "
                f"({self.entropy_coef_max})."
            )
        self._check_correction()

    def _check_correction(self) -> None:
        one_of(self, "vllm_importance_sampling_mode", CORRECTIONS)
        mode = self.vllm_importance_sampling_mode
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min ({low}) must be less than vllm_importance_sampling_clip_max "
                f"({high})."
            )
        if not self.vllm_importance_sampling_correction:
            return
        if self.loss_type == "vespo" and mode.startswith("sequence"):
            raise ValueError(
                f"vllm_importance_sampling_mode is {mode!r}, but loss_type 'vespo' makes the completion's weight of "
                "its tokens' own: set token_truncate or token_mask, or vllm_importance_sampling_correction: false."
            )
        if mode.endswith("truncate") and low is None and high is None:
            raise ValueError(
                f"vllm_importance_sampling_mode {mode!r} needs a bound: set vllm_importance_sampling_clip_max or "
                "vllm_importance_sampling_clip_min."
            )
        for name, value in self._shaping().items():
            raise ValueError(
                f"{name} is {value!r}: the sampler's probabilities are then of another distribution than the "
                "trainer's, and the importance ratio between them is biased. Leave it at its default, or set "
                "vllm_importance_sampling_correction: false."
            )

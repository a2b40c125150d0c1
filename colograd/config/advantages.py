"""How rewards become advantages, and which groups and completions are trained on."""

from __future__ import annotations

from dataclasses import dataclass

from .knob import at_least, knob, one_of


@dataclass
class AdvantageKnobs:
    """Advantages."""

    dynamic_sampling: bool = knob(
        False,
        "Draw further prompts until a step has its number of groups with a reward difference (DAPO). Reward metrics "
        "are of all that was sampled.",
    )
    dynamic_sampling_max_rounds: int = knob(
        10, "How often further prompts are drawn at most; then the step trains on fewer groups."
    )
    scale_rewards: str = knob(
        "group",
        "Divide advantages by the standard deviation of the group's rewards (`group`, or TRL's `true`), of those of "
        "all groups of the step on all ranks (`batch`), or not at all (`none`, `false`).",
    )
    multi_objective_aggregation: str = knob(
        "sum_then_normalize",
        "Several reward functions: sum the weighted rewards, then normalise (`sum_then_normalize`); or normalise each "
        "function's in the group, sum, and scale over the step (`normalize_then_sum`, GDPO), where `scale_rewards` has "
        "no part, as in TRL.",
    )
    advantage_baseline: str = knob(
        "mean",
        "What a completion is compared with: the `mean` of its group, or of the others in it (`leave_one_out`, RLOO).",
    )
    mask_truncated_completions: bool = knob(False, "Leave completions that hit the token limit out of the loss.")

    def _resolve_advantages(self) -> None:
        truth = str(self.scale_rewards).lower()  # a text on the command line
        self.scale_rewards = {"true": "group", "false": "none"}.get(truth, self.scale_rewards)
        at_least(self, 1, "dynamic_sampling_max_rounds")
        one_of(self, "scale_rewards", ("group", "batch", "none"))
        one_of(self, "multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"))
        one_of(self, "advantage_baseline", ("mean", "leave_one_out"))
        if self.multi_objective_aggregation == "normalize_then_sum" and self.advantage_baseline == "leave_one_out":
            raise ValueError(
                "advantage_baseline is 'leave_one_out' and multi_objective_aggregation is 'normalize_then_sum', which "
                "compares with the mean: scaling over the step undoes any other constant. Set one of the two back."
            )

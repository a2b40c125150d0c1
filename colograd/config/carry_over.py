"""The end of a round: it waits for its last completions, or lets them go on in the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .knob import at_least, knob
from .sampling import shaping
from .steps import StepKnobs

# Sampling parameters that a completion can keep when it goes on as a request of its own. Others (`stop`, `min_tokens`)
# depend on a whole request.
OF_A_TOKEN = ("top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos")


@dataclass
class CarryOverKnobs(StepKnobs):
    """Carrying completions over."""

    carry_over: float | None = knob(
        None,
        "Sample more groups at once than a round takes, and end it when this share of them is done (0.8, say; from 0.5 "
        "up to below 1): what isn't done stops where it is and goes on in the next round, under its weights. The "
        "sampler's correction weighs each token by the version that sampled it. Unset: a round waits for its last "
        "completion, and all is on-policy. See docs/guide/long-completions.md.",
    )
    carry_over_max_age: int = knob(
        2, "Rounds over which `carry_over` carries a group at most: the next one doesn't end before it is done."
    )

    def _check_carry_over(self) -> None:
        """Check the setting; called when sampling and objective are resolved."""
        if self.carry_over is False:  # YAML reads `off` as False
            self.carry_over = None
        if self.carry_over is None:
            return
        if isinstance(self.carry_over, bool | str) or not 0.5 <= self.carry_over < 1:
            raise ValueError(
                f"carry_over is {self.carry_over}, but must be a share from 0.5 up to below 1 of the groups that are "
                "sampled at once: 0.8 is usual; leave it out for rounds that wait for all."
            )
        at_least(self, 1, "carry_over_max_age")
        of: Any = vars(self)  # fields of the other groups
        of_request = [name for name in of["generation_kwargs"] or {} if name not in OF_A_TOKEN]
        reasons = [
            (of["dynamic_sampling"], "dynamic_sampling: true", "chooses a round's groups among all that were sampled"),
            (of["curriculum"] is not None, "curriculum", "draws prompts by the pass rates of whole rounds"),
            (self.overlap != "off", "overlap: auto", "trains groups of a round whose groups aren't known yet"),
            (of["router_replay"], "router_replay: true", "needs the experts of completions that were stopped"),
            (
                not of["vllm_importance_sampling_correction"],
                *_uncorrected(of),
            ),
            (
                of_request,
                f"generation_kwargs has {', '.join(of_request)}, which",
                f"a completion in parts may not have (these may stay: {', '.join(OF_A_TOKEN)})",
            ),
        ]
        for applies, name, reason in reasons:
            if applies:
                raise ValueError(f"carry_over is {self.carry_over}, but {name} {reason}: leave one of the two out.")

    @property
    def groups_per_round(self) -> int:
        """Groups that a rank's engine gives the optimizer steps of a round."""
        completions = self.per_device_train_batch_size * (self.steps_per_generation or 1)
        return completions // (self.num_generations or 1)

    @property
    def groups_in_flight(self) -> int:
        """Groups that a rank's engine samples at once in a round."""
        if self.carry_over is None:
            return self.groups_per_round
        return math.ceil(self.groups_per_round / self.carry_over - 1e-9)


def _uncorrected(of: Mapping[str, Any]) -> tuple[str, str]:
    """Name the setting that leaves old tokens uncorrected, and its effect: the correction's own, or one that disables
    it."""
    leaves = "leaves tokens of older weights uncorrected"
    changes = ", ".join(shaping(of))
    if not changes:
        return "vllm_importance_sampling_correction: false", leaves
    return f"{changes}, which changes the sampler's distribution,", f"{leaves} (a top_k alone doesn't)"

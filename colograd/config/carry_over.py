"""The end of a round: it waits for its last completions, or lets them go on in the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .knob import knob
from .steps import StepKnobs


@dataclass
class CarryOverKnobs(StepKnobs):
    """Carrying completions over."""

    carry_over: float | None = knob(
        None,
        "Sample more groups at once than a round needs, and end the round when this share of them is done (0.5 to"
        " below 1, e.g. 0.8). The others stop and go on in the next round, under its weights; the sampler's "
        "correction weighs each token by the version that sampled it. Unset: a round waits for its last "
        "completion. See docs/guide/long-completions.md.",
        at_least=0.5,
        below=1,
        must_be="a share from 0.5 up to below 1 of the groups that are sampled at once",
        remedy="0.8 is usual; leave it out for rounds that wait for all",
        spellings={"false": None, "off": None},  # YAML reads `off` as False
        extension="carry_over",
    )
    carry_over_max_age: int = knob(
        2,
        "Maximum number of rounds over which `carry_over` carries a group; the next round waits for it.",
        at_least=1,
        extension="carry_over",
    )

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

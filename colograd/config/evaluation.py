"""What `evaluate` does otherwise than training, and which result makes a model the best one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .knob import at_least, knob
from .sampling import SamplingKnobs
from .steps import StepKnobs

# Metrics that need the policy's forward.
OF_LOSS = re.compile(r"(^|_)(loss|entropy|kl|(clip_ratio|cispo_clip_ratio|sampling|vespo)(/.*)?)$")


@dataclass
class EvaluationKnobs(SamplingKnobs, StepKnobs):
    """Evaluation."""

    num_generations_eval: int | None = knob(
        None, "Completions per prompt in `evaluate`; default `num_generations`, or 1 where evaluation is greedy."
    )
    temperature_eval: float | None = knob(None, "Temperature in `evaluate`; default `temperature`, 0 is greedy.")
    max_completion_length_eval: int | None = knob(
        None, "Tokens a completion may have in `evaluate`; default `max_completion_length`."
    )
    pass_threshold_eval: float = knob(1.0, "Weighted reward from which a completion counts as a pass in `eval_pass@k`.")
    loss_eval: bool | None = knob(
        None,
        "Run the policy's forward on the completions of `evaluate`, for `eval_loss`, the entropy and TRL's other "
        "metrics of the loss. Unset: true, as in TRL, unless `temperature_eval` differs from `temperature`.",
    )

    def eval_generations(self) -> int:
        """Completions per prompt in `evaluate`."""
        return int(self.num_generations_eval or (1 if self.temperature_eval == 0 else self.num_generations) or 1)

    def _resolve_best_metric(self) -> None:
        """``metric_for_best_model`` is `reward` where nothing is said: an evaluation has no loss unless asked for one.
        Called before transformers, which would take the loss.

        Raises:
            ValueError: only the direction is said, and it is that of a loss, TRL's default.
        """
        if self.metric_for_best_model is not None or not self.load_best_model_at_end:
            return
        if self.greater_is_better is False:
            raise ValueError(
                "greater_is_better is false and metric_for_best_model isn't set, but is `reward` then, of which more "
                "is better: say metric_for_best_model, or remove greater_is_better."
            )
        self.metric_for_best_model: str | None = "reward"

    def _check_evaluation(self) -> None:
        at_least(self, 1, "num_generations_eval")
        at_least(self, 0, "temperature_eval")
        if self.temperature_eval == 0 and (self.num_generations_eval or 1) > 1:
            raise ValueError(
                f"num_generations_eval is {self.num_generations_eval}, but with temperature_eval 0 all completions of "
                "a prompt are equal: set it to 1, or raise temperature_eval."
            )
        of_loss = OF_LOSS.search(str(self.metric_for_best_model or ""))
        if of_loss and self.loss_eval is False:
            raise ValueError(
                f"metric_for_best_model is {self.metric_for_best_model!r}, but with loss_eval: false `evaluate` "
                "computes no loss: use `reward`, or leave loss_eval out."
            )
        at_same_temperature = self.temperature_eval in (None, self.temperature)
        if self.loss_eval is None:
            self.loss_eval = at_same_temperature or bool(of_loss)
        if self.loss_eval and not at_same_temperature:
            raise ValueError(
                f"temperature_eval is {self.temperature_eval}, but loss_eval compares the sampler's probabilities with "
                f"the trainer's, at temperature {self.temperature}: leave temperature_eval out, or loss_eval."
            )

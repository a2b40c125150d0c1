"""Settings of sampling: how vLLM draws completions in training, and in `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .knob import knob
from .steps import StepKnobs

# Parameters of vLLM that can change the sampler's distribution. `NEUTRAL` has their values without effect.
# A parameter outside `NEUTRAL` has no effect if its value is 0 or empty.
SHAPING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "thinking_token_budget", "extra_args",
)  # fmt: skip
TRUNCATING = ("top_p", "top_k", "min_p")  # These leave only some tokens to draw from, and vLLM can record which.

# Parameter in `generation_kwargs` -> its values without effect, because vLLM samples so anyway.
# TRL repeats the prompt for each completion, so its recipes may set `n` to 1.
ANYWAY: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,), "n": (1,), "num_return_sequences": (1,), "num_beams": (1,), "num_beam_groups": (1,),
    "use_cache": (True,), "early_stopping": (False,), "length_penalty": (1,), "typical_p": (1,),
    "no_repeat_ngram_size": (0,), "cache_implementation": (None,),
}  # fmt: skip
NEUTRAL = {"top_p": (1.0,), "top_k": (0, -1), "repetition_penalty": (1.0,), "thinking_token_budget": (-1,)}


@dataclass
class SamplingKnobs:
    """Settings of sampling."""

    max_completion_length: int | None = knob(512, "Maximum tokens of a completion.", at_least=1)
    temperature: float = knob(1.0, "Sampling temperature; the loss uses the same.")
    top_p: float = knob(1.0, "Nucleus sampling; 1.0 is off.", above=0, at_most=1, remedy="1.0 turns it off")
    top_k: int = knob(0, "Top-k sampling; 0 is off.")
    min_p: float | None = knob(None, "Minimum probability relative to the top token's.")
    repetition_penalty: float = knob(1.0, "Penalty on tokens that are already present; 1.0: off.")
    generation_kwargs: dict[str, Any] | str | None = knob(None)
    """Other `vllm.SamplingParams`, such as `stop`, `stop_token_ids`, `bad_words`, `repetition_detection` or
    `structured_outputs` (`{json: <schema>}`, `{regex: ...}`, `{choice: [...]}`). `skip_special_tokens: false` keeps
    special tokens in the texts of rewards and logs. Unsupported parameters are errors; names of transformers may stay
    with values that change nothing."""
    vllm_structured_outputs_regex: str | None = knob(None, "A regular expression that every completion matches.")

    def _drop_what_is_done_anyway(self) -> list[str]:
        kwargs = self.generation_kwargs
        if not isinstance(kwargs, dict):
            return []
        length = (self.max_completion_length,)
        anyway = ANYWAY | {"max_new_tokens": length, "max_tokens": length, "temperature": (self.temperature,)}
        needless = [name for name, value in kwargs.items() if value is None or value in anyway.get(name, ())]
        self.generation_kwargs = {name: value for name, value in kwargs.items() if name not in needless} or None
        for name, value in (self.generation_kwargs or {}).items():
            # `n`, `max_tokens` and `temperature` are also parameters of vLLM, which are checked later.
            if name in anyway and name not in ("n", "max_tokens", "temperature"):
                raise ValueError(
                    f"generation_kwargs sets {name!r} to {value!r}, but training uses {name} = "
                    f"{anyway[name][0]!r}: remove the entry. To limit the length, set max_completion_length. "
                    "For a greedy evaluation, set temperature_eval: 0."
                )
        return [f"config: `{name}` of generation_kwargs has no effect: it is so anyway" for name in needless]


def shaping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that make the sampler's distribution differ from softmax(logits / temperature)."""
    own = ("top_p", "top_k", "min_p", "repetition_penalty", "vllm_structured_outputs_regex")
    values = {name: settings.get(name) for name in own}
    more = settings.get("generation_kwargs")
    values |= {name: more[name] for name in SHAPING if name in more} if isinstance(more, dict) else {}
    neutral: dict[str, tuple[Any, ...]] = {name: (*NEUTRAL.get(name, (0, [], {})), None) for name in values}
    return {name: value for name, value in values.items() if value not in neutral[name]}


@dataclass
class EvaluationKnobs(SamplingKnobs, StepKnobs):
    """Settings of evaluation."""

    num_generations_eval: int | None = knob(None, at_least=1)
    """Completions per prompt in `evaluate`; default `num_generations`, or 1 if evaluation is greedy."""
    temperature_eval: float | None = knob(None, at_least=0)
    """Temperature in `evaluate`; default `temperature`, 0 is greedy."""
    max_completion_length_eval: int | None = knob(None)
    """Tokens a completion may have in `evaluate`; default `max_completion_length`."""
    pass_threshold_eval: float = knob(1.0, "Weighted reward from which a completion counts as a pass in `eval_pass@k`.")
    loss_eval: bool | None = knob(None, nargs="?", const=True)
    """Run the policy's forward on the completions of `evaluate`, for `eval_loss`, the entropy and TRL's other metrics
    of the loss. Unset: true, as in TRL, unless `temperature_eval` differs from `temperature`."""

    def eval_generations(self) -> int:
        return int(self.num_generations_eval or (1 if self.temperature_eval == 0 else self.num_generations) or 1)

    def _resolve_best_metric(self) -> None:
        """With load_best_model_at_end, choose `reward` as metric_for_best_model if the user sets none.

        transformers would choose the loss, which an evaluation may lack.
        """
        if self.metric_for_best_model is not None or not self.load_best_model_at_end:
            return
        if self.greater_is_better is False:
            raise ValueError(
                "greater_is_better is false, but metric_for_best_model isn't set, so the metric is `reward`, and a "
                "higher reward is better: set metric_for_best_model, or remove greater_is_better."
            )
        self.metric_for_best_model: str | None = "reward"

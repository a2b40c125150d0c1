"""How the engine samples completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .knob import at_least, knob

# Parameters of vLLM by which it samples from another distribution than the model's at the temperature, and the values
# at which they change nothing. Of those that aren't named, these are None, 0 and what is empty.
SHAPING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs",
)  # fmt: skip
# Names of transformers' generation that say nothing where they have one of these values. (`n` is one in TRL's requests,
# each of which has a copy of the prompt.)
ANYWAY: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "n": (1,),
    "num_return_sequences": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "use_cache": (True,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "no_repeat_ngram_size": (0,),
    "cache_implementation": (None,),
}
NEUTRAL = {"top_p": (1.0,), "top_k": (0, -1), "repetition_penalty": (1.0,)}


@dataclass
class SamplingKnobs:
    """Sampling."""

    max_completion_length: int | None = knob(512, "Tokens a completion may have.")
    temperature: float = knob(1.0, "Sampling temperature; the loss uses the same.")
    top_p: float = knob(1.0, "Nucleus sampling; 1.0 is off.")
    top_k: int = knob(0, "Top-k sampling; 0 is off.")
    min_p: float | None = knob(None, "Minimum probability relative to the top token's.")
    repetition_penalty: float = knob(1.0, "Penalty on tokens already present; 1.0 is off.")
    generation_kwargs: dict[str, Any] | str | None = knob(
        None,
        "More `vllm.SamplingParams`, such as `stop`, `stop_token_ids`, `bad_words` or `structured_outputs` (a mapping: "
        "`{json: <schema>}`, `{regex: ...}`, `{choice: [...]}`). Names of transformers (`do_sample: true`, say) may "
        "stay where they ask for what is done anyway.",
    )
    vllm_structured_outputs_regex: str | None = knob(None, "A regular expression that every completion matches.")

    def _check_sampling(self) -> None:
        at_least(self, 1, "max_completion_length")
        if self.max_completion_length is None:
            raise ValueError("max_completion_length is None, but memory is planned by it: give a number of tokens.")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature}, but completions of a group must differ: set it above 0 (1.0 is "
                "usual). For greedy evaluation use temperature_eval: 0."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must be in (0, 1]: 1.0 turns it off.")

    def _drop_what_is_done_anyway(self) -> list[str]:
        """Take out of ``generation_kwargs`` what asks for nothing else, such as files of TRL's have.

        Returns:
            A line for each.

        Raises:
            ValueError: a name of transformers asks for something else.
        """
        given = self.generation_kwargs
        if not isinstance(given, dict):
            return []
        length, temperature = self.max_completion_length, self.temperature
        anyway = ANYWAY | {"max_new_tokens": (length,), "max_tokens": (length,), "temperature": (temperature,)}
        dropped = [name for name, value in given.items() if name in anyway and value in anyway[name]]
        self.generation_kwargs = {name: value for name, value in given.items() if name not in dropped} or None
        for name, value in (self.generation_kwargs or {}).items():
            if name in anyway and name not in ("n", "max_tokens", "temperature"):  # names of vLLM's are looked at later
                raise ValueError(
                    f"generation_kwargs sets {name!r} to {value!r}, but completions are always drawn by vLLM with "
                    f"{anyway[name][0]!r}: remove it. (Lengths are max_completion_length; greedy evaluation is "
                    "temperature_eval: 0.)"
                )
        return [f"config: `{name}` of generation_kwargs has no effect: it is so anyway" for name in dropped]

    def _shaping(self) -> dict[str, object]:
        """The settings that make the engine sample from another distribution than the model's at the temperature."""
        own = ("top_p", "top_k", "min_p", "repetition_penalty", "vllm_structured_outputs_regex")
        given = {name: getattr(self, name) for name in own}
        more = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        given |= {name: more[name] for name in SHAPING if name in more}
        return {name: value for name, value in given.items() if value not in NEUTRAL.get(name, (None, 0, [], {}))}

"""Sampling parameters of a run, seeds of requests, and the order in which prompts start."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..batch import FinishReason, ModelInput, Prompt
from ..config import GRPOConfig
from ..config.sampling import SHAPING

RESERVED = (  # Parameters of vllm.SamplingParams that only the trainer may set.
    "n", "seed", "max_tokens", "temperature", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize",
    "output_kind",
)  # fmt: skip
# Parameters of vllm.SamplingParams that `generation_kwargs` may set. Others are refused.
SUPPORTED = (
    *SHAPING, "stop", "stop_token_ids", "ignore_eos", "repetition_detection", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip

LENGTHS = "lengths_{rank}.json"  # File in a checkpoint with the mean completion length of each prompt of a rank.
UNKNOWN_TOKENS = "sampling/unknown_tokens"  # Metric: number of sampled ids that the tokenizer has no token for.


@dataclass(frozen=True, slots=True)
class Sampling:
    n: int  # Number of completions per prompt (G).
    max_tokens: int  # Maximum tokens of a completion.
    temperature: float  # Divisor of the logits. 0 means greedy decoding.
    options: dict[str, Any]  # Further arguments of vllm.SamplingParams.

    @classmethod
    def for_training(cls, config: GRPOConfig) -> Sampling:
        return cls._from(config, config.num_generations or 1, config.max_completion_length, config.temperature)

    @classmethod
    def for_evaluation(cls, config: GRPOConfig) -> Sampling:
        temperature = config.temperature if config.temperature_eval is None else config.temperature_eval
        max_tokens = config.max_completion_length_eval or config.max_completion_length
        return cls._from(config, config.eval_generations(), max_tokens, temperature)

    @classmethod
    def _from(cls, config: GRPOConfig, n: int, max_tokens: int | None, temperature: float) -> Sampling:
        from vllm import sampling_params

        options: dict[str, Any] = {
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p or 0.0,
            "repetition_penalty": config.repetition_penalty,
        }
        options |= config.generation_kwargs or {}  # type: ignore[arg-type]
        if (regex := config.vllm_structured_outputs_regex) is not None:
            if options.get("structured_outputs") is not None:
                raise ValueError(
                    "`vllm_structured_outputs_regex` and `generation_kwargs: {structured_outputs: ...}` set the same "
                    "option of vLLM. Remove one of the two."
                )
            options["structured_outputs"] = sampling_params.StructuredOutputsParams(regex=regex)
        classes = {"repetition_detection": "RepetitionDetectionParams", "structured_outputs": "StructuredOutputsParams"}
        for name, class_name in classes.items():
            if isinstance(given := options.get(name), dict):
                kind = getattr(sampling_params, class_name)
                known = [key for key in inspect.signature(kind).parameters if not key.startswith("_")]
                if unknown := [key for key in given if key not in known]:
                    raise ValueError(f"`{name}` has the key {unknown[0]!r}: use only the keys {', '.join(known)}.")
                options[name] = kind(**given)
        if isinstance(bias := options.get("logit_bias"), dict):  # in JSON the keys (token ids) are strings
            options["logit_bias"] = {int(token): value for token, value in bias.items()}
        return cls(n, int(max_tokens or 512), temperature, options)


def request_seed(seed: int, position: int, purpose: str = "train") -> int:
    """Return the seed of the prompt at ``position`` in the stream of prompts. The seed has 62 bits,
    because vLLM adds i to the seed for the i-th completion, and the sum must fit in 64 bits."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def check_sampling(config: GRPOConfig) -> None:
    from vllm import SamplingParams

    known = inspect.signature(SamplingParams).parameters
    for name in config.generation_kwargs or {}:
        if name in RESERVED:
            raise ValueError(
                f"generation_kwargs sets {name!r}, which the trainer sets itself: remove it. Set `num_generations` "
                "instead of `n`, and `max_completion_length` instead of `max_tokens`. Set `seed` and `temperature` "
                "outside of `generation_kwargs`."
            )
        if name not in known:
            near = difflib.get_close_matches(name, SUPPORTED, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " Remove it."
            raise ValueError(f"generation_kwargs sets {name!r}, which vLLM's SamplingParams doesn't have.{hint}")
        if name not in SUPPORTED:
            raise ValueError(
                f"generation_kwargs sets {name!r}, but the trainer doesn't support this parameter of vLLM. Remove it."
            )
    try:
        for drawn in (Sampling.for_training(config), Sampling.for_evaluation(config)):
            SamplingParams(n=drawn.n, max_tokens=drawn.max_tokens, temperature=drawn.temperature, **drawn.options)
    except Exception as error:  # vLLM's validation errors aren't ValueErrors in some versions
        raise ValueError(f"The sampling settings aren't valid for vLLM: {error}") from None


def finish_reason_of(name: str) -> FinishReason:
    if name not in [*FinishReason]:
        raise RuntimeError(
            f"vLLM ended a completion with the finish reason {name!r}, so the completion can't be trained on. Set "
            "`verbose: true`, and look for the cause in vLLM's log."
        )
    return FinishReason(name)


class LengthHistory:
    """Mean completion length of each prompt in tokens, from the prompt's last sampling. Prompts with long completions
    start first, by the longest-processing-time rule of list scheduling (Graham 1969, https://doi.org/10.1137/0117039).
    A checkpoint contains the lengths, so that a resumed run has the same order of prompts. Another order could
    change the engine's rounding."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}  # Mean length in tokens by `ModelInput.key` of the prompt.

    def add(self, prompt: ModelInput, lengths: Sequence[int]) -> None:
        self._means[prompt.key] = sum(lengths) / len(lengths)

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        if not self._means:
            return list(prompts)
        unknown = sum(self._means.values()) / len(self._means)
        return sorted(prompts, key=lambda prompt: -self._means.get(prompt.input.key, unknown))

    def save(self, folder: str | Path, rank: int) -> None:
        Path(folder, LENGTHS.format(rank=rank)).write_text(json.dumps(self._means))

    def load(self, folder: str | Path, rank: int) -> None:
        path = Path(folder, LENGTHS.format(rank=rank))
        self._means = json.loads(path.read_text()) if path.is_file() else {}

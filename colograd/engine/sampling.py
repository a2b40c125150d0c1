"""How completions are drawn: the sampling parameters of a run, checked against vLLM's, and the seed of each request."""

from __future__ import annotations

import difflib
import hashlib
import inspect
from dataclasses import dataclass
from typing import Any

from ..config import GRPOConfig

# Sampling parameters that the trainer sets for each request.
RESERVED = (
    "n", "seed", "max_tokens", "temperature", "logprobs", "prompt_logprobs", "flat_logprobs", "detokenize",
    "output_kind",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampling:
    n: int  # G: completions per prompt
    max_tokens: int
    temperature: float
    options: dict[str, Any]  # further vllm.SamplingParams

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
        options: dict[str, Any] = {
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p or 0.0,
            "repetition_penalty": config.repetition_penalty,
        }
        options |= config.generation_kwargs or {}  # type: ignore[arg-type]
        if (structured := _structured_outputs(config)) is not None:
            options["structured_outputs"] = structured
        return cls(n, int(max_tokens or 512), temperature, options)


def _structured_outputs(config: GRPOConfig) -> Any:
    """What every completion must match, as vLLM's StructuredOutputsParams; None: nothing.

    Raises:
        ValueError: it is given twice, or vLLM knows no such form.
    """
    from vllm.sampling_params import StructuredOutputsParams

    given: Any = (config.generation_kwargs or {}).get("structured_outputs")  # type: ignore[union-attr]
    regex = config.vllm_structured_outputs_regex
    if given is not None and regex is not None:
        raise ValueError(
            "vllm_structured_outputs_regex and generation_kwargs: {structured_outputs: ...} say the same thing: give "
            "one of them."
        )
    if regex is not None:
        return StructuredOutputsParams(regex=regex)
    if not isinstance(given, dict):
        return given
    forms = [name for name in inspect.signature(StructuredOutputsParams).parameters if not name.startswith("_")]
    if unknown := [name for name in given if name not in forms]:  # vLLM would ignore them
        raise ValueError(f"structured_outputs has {unknown[0]!r}, but knows {', '.join(forms)}.")
    return StructuredOutputsParams(**given)


def request_seed(seed: int, position: int, purpose: str = "train") -> int:
    """The seed of one prompt's request, from the run's seed and the prompt's place in the stream: a hash of 62 bits, as
    vLLM seeds the i-th of n completions with seed + i."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def check_sampling(config: GRPOConfig) -> None:
    """Raise a ValueError if ``generation_kwargs`` has names that vLLM doesn't know, or that the trainer sets itself."""
    from vllm import SamplingParams

    known = inspect.signature(SamplingParams).parameters
    for name in config.generation_kwargs or {}:
        if name in RESERVED:
            raise ValueError(
                f"generation_kwargs sets {name!r}, which the trainer sets itself: use num_generations, seed, "
                "max_completion_length or temperature."
            )
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " Remove it."
            raise ValueError(f"generation_kwargs sets {name!r}, which vLLM's SamplingParams doesn't have.{hint}")
    try:
        for drawn in (Sampling.for_training(config), Sampling.for_evaluation(config)):
            SamplingParams(n=drawn.n, max_tokens=drawn.max_tokens, temperature=drawn.temperature, **drawn.options)
    except Exception as error:  # vLLM's validation errors are no ValueErrors in every version
        raise ValueError(f"The sampling settings aren't valid for vLLM: {error}") from None

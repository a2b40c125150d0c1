"""`EngineFeature`: the interface of extensions that change the engine, and `EngineUse`: facts about the run.

An extension registers a function under ``engine_feature`` in its ``HOOKS``. The function gets the configuration and an
`EngineUse`, and returns an `EngineFeature`, or None if the extension's option is off. The function is called once, when
an engine is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..batch import ModelInput
from ..config import GRPOConfig
from ..parallel.layout import RankLayout
from ..parallel.ranks import on_all_ranks
from ..policy.loading import Policy
from ..policy.lora import Adapter
from ..runtime.registry import hooks
from .protocol import Sampled, ServedWeights


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Facts about a run that its engine needs, and that the configuration doesn't hold."""

    end_tokens: tuple[int, ...] = ()  # Token ids that end a completion, in addition to the checkpoint's ids.
    adapter: Adapter | None = None  # LoRA adapter that gets a slot in the engine.
    sequences: int = 0  # Maximum number of sequences in one generation. 0 means unknown.
    trained: int = 0  # Maximum number of sequences in one generation of training. 0 means the same as ``sequences``.
    blank: bool = False  # Whether to skip reading weights, because a weight sync writes all weights.
    tokens: int = 0  # Number of tokens in the tokenizer, often fewer than the model's embedding rows. 0 means unknown.
    policy: Policy | None = None  # The model that is trained. None for an engine without training, e.g. evaluation.
    prompts: Sequence[Any] = ()  # The run's datasets of prompts.
    has_tools: bool = False  # Whether tools may append tokens to a prompt.
    model_config: Any = None  # Transformers' configuration of the model. Needed if ``policy`` is None.


class BuiltEngine(Protocol):
    """The members of a built `VLLMEngine` that an `EngineFeature` may use."""

    layout: RankLayout
    vocab_size: int  # Vocabulary size of the checkpoint.
    served: ServedWeights  # The policy's quantised weights that the engine reads in place. A feature may set `served`.

    @property
    def core(self) -> Any:
        """The `LLMEngine` of vLLM that schedules and decodes requests in this process."""


class EngineFeature:
    """An extension's change of `VLLMEngine`. Each method has a default without effect. A subclass overrides some."""

    blank = False  # whether vLLM is built without reading weights, because a weight sync writes all weights

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments of `vllm.LLM` that extend or override ``arguments``, which contain the user's arguments."""
        return {}

    def while_built(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that is entered while vLLM is built."""
        return contextlib.nullcontext()

    def built(self, engine: BuiltEngine) -> None:
        """Change, or keep a reference to, an engine that has just been built."""

    def check_processor(self, processor: Any) -> None:
        """Raise an error if vLLM turns images into other inputs than the trainer's ``processor`` does."""

    def while_generating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that is entered during each generation."""
        return contextlib.nullcontext()

    def request(self, prompt: ModelInput) -> Any:
        """Return ``prompt`` as an input of vLLM. None means that its token ids are the input."""

    def completions(self, request: str, prompt: ModelInput, output: Any, sampled: list[Sampled]) -> list[Sampled]:
        """Return ``sampled``, the completions of an ended request, with data from ``output``, vLLM's RequestOutput."""
        return sampled

    def scored(self, prompt: ModelInput, output: Any) -> None:
        """Check vLLM's ``output`` for a ``prompt`` of `Engine.prompt_logprobs`. Drop all cached data that depend on the
        weights, because the weights may change before the next call."""

    def take_counts(self) -> dict[str, float]:
        """Return the feature's counts by metric name. Each call sets the counts to 0."""
        return {}

    def drop(self, request: str) -> None:
        """Drop all data that the feature has about ``request``, because the request has ended."""

    def forget(self) -> None:
        """Drop all data that were computed with the engine's old weights, after a weight sync."""

    def close(self) -> None:
        """Free the memory of the feature when the engine is closed."""


def engine_features(config: GRPOConfig, use: EngineUse) -> tuple[EngineFeature, ...]:
    """Return an `EngineFeature` for each extension that the run's configuration turns on. All ranks must call this."""
    with on_all_ranks("the engine's features"):
        offers = (offer(config, use) for offer in hooks("engine_feature"))
        return tuple(feature for feature in offers if feature is not None)

"""`EngineFeature`: the interface of an optional part of the engine, and the facts of a run that decide about it.

An extension offers its features at the seam ``engine_feature``: a function of the configuration and an `EngineUse` that
returns a feature, or None if its option is off. It is called once, when an engine is built.
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
    """How a run uses its engine, in addition to the configuration."""

    end_tokens: tuple[int, ...] = ()  # ids that end a completion, besides the checkpoint's own
    adapter: Adapter | None = None  # LoRA that gets a slot; see `load_adapter`
    sequences: int = 0  # maximum number of sequences in one generation; 0: unknown
    trained: int = 0  # maximum number of sequences in one generation of training; 0: ``sequences``
    blank: bool = False  # whether to skip loading weights, because a publish writes all of them
    tokens: int = 0  # number of tokens in the tokenizer, often fewer than the model's rows; 0: unknown
    policy: Policy | None = None  # the policy that is trained; None: the engine is alone
    prompts: Sequence[Any] = ()  # the run's datasets of prompts
    has_tools: bool = False  # whether tools add to a prompt
    model_config: Any = None  # without a policy: transformers' configuration of the model


class BuiltEngine(Protocol):
    """The members of `VLLMEngine` that features use."""

    layout: RankLayout
    vocab_size: int  # vocabulary size of the checkpoint
    served: ServedWeights  # set by the feature that serves weights

    @property
    def core(self) -> Any:
        """vLLM's LLMEngine."""


class EngineFeature:
    """An optional part of `VLLMEngine`; a subclass overrides some methods."""

    blank = False  # whether the engine is built without reading weights, because a publish writes them

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return further arguments of `vllm.LLM`. ``arguments`` are those so far, the user's among them."""
        return {}

    def while_built(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the construction of vLLM."""
        return contextlib.nullcontext()

    def built(self, engine: BuiltEngine) -> None:
        """Change or watch an engine that has just been built."""

    def check_processor(self, processor: Any) -> None:
        """See `Engine.check_processor`."""

    def while_generating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for one generation."""
        return contextlib.nullcontext()

    def request(self, prompt: ModelInput) -> Any:
        """Return a prompt in vLLM's form; None: its token ids are enough."""

    def completions(self, request: str, prompt: ModelInput, output: Any, sampled: list[Sampled]) -> list[Sampled]:
        """Return the completions of a finished or stopped request, with additions. ``output``: vLLM's RequestOutput."""
        return sampled

    def scored(self, prompt: ModelInput, output: Any) -> None:
        """Check the output of `Engine.prompt_logprobs`, and forget it: the weights may change before the next call."""

    def take_counts(self) -> dict[str, float]:
        """Return what the feature has counted since the last call, as metrics."""
        return {}

    def drop(self, request: str) -> None:
        """Drop everything about a request that has ended."""

    def forget(self) -> None:
        """Drop everything that was computed with older weights."""

    def close(self) -> None:
        """Free the feature's memory."""


def engine_features(config: GRPOConfig, use: EngineUse) -> tuple[EngineFeature, ...]:
    """Return the features of the installed extensions that a run uses. A collective."""
    with on_all_ranks("the engine's features"):
        offers = (offer(config, use) for offer in hooks("engine_feature"))
        return tuple(feature for feature in offers if feature is not None)

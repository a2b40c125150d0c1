"""`Engine`: the interface of an inference engine in the trainer's process, implemented by `VLLMEngine`.

`EngineFeature` is the interface of extensions that change the engine. An extension registers a function under
``engine_feature`` in its ``HOOKS``. For each engine the function is called with the configuration and an `EngineUse`.
The function returns an `EngineFeature`, or None if the extension's option is off.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ..batch import FinishReason, Group, ModelInput, Prompt
from ..config import GRPOConfig
from ..parallel.layout import RankLayout
from ..parallel.ranks import on_all_ranks
from ..policy.loading import Policy
from ..policy.lora import Adapter
from ..riders import Rider
from ..runtime.registry import hooks
from .sampling import Sampling
from .tensors import VLLMTensors

T = TypeVar("T")


class StaleWeights(RuntimeError):
    """The error of sampling while the engine's weights are not from the required optimizer step."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion of C tokens, sampled by the engine."""

    ids: array[int]  # Token ids of the completion, [C] int32.
    logprobs: array[float]  # Log-probabilities of the sampled tokens in nats, [C] float32.
    finish_reason: FinishReason
    riders: tuple[Rider, ...] = ()  # Per-token data of extensions.
    # (log-probability in nats, rank in the vocabulary) of each prompt token. None for the first token. Empty unless
    # the request sets vLLM's `prompt_logprobs`.
    prompt: Sequence[tuple[float, int] | None] = ()


class Load(NamedTuple):
    """The engine's present load: numbers of sequences, and use of the KV cache."""

    running: int  # Number of running sequences.
    waiting: int  # Number of sequences that wait to start.
    cache: float  # Used fraction of the KV cache, between 0 and 1.
    preemptions: int = 0  # How often a sequence lost its KV cache since the engine was built.


class Engine(Protocol):
    """An inference engine that samples with the weights of one known optimizer step, and can free its KV cache."""

    layout: RankLayout
    version: int | None  # Optimizer step of the weights. None means that the step is unknown.
    context: int  # Maximum tokens of a sequence, prompt and completion together.
    vocab_size: int  # Vocabulary size in the configuration of the loaded checkpoint.
    max_sequences: int  # Maximum number of sequences decoded at once. Further sequences wait in a queue.
    kv_tokens: int  # Capacity of the KV cache in tokens.
    weight_bytes: int  # Bytes of the model's weights on this rank.
    dtype: torch.dtype  # Dtype of activations and of most weights.
    blank: bool  # Whether the engine was built without the checkpoint's weights, because a weight sync writes them.
    sleeps: bool  # Whether `sleep` frees the KV cache's memory.
    asleep: bool  # Whether the KV cache is freed now.
    served: Any  # `ServedLayers`: quantised weights that the engine reads in the policy's memory. None without any.
    after_step: list[Callable[[], None]]  # Functions that `advance` calls after its engine step, in list order.

    def submit(
        self, prompt: ModelInput | Sequence[int], sampling: Sampling, seed: int, *, n: int | None = None,
        spent: int = 0,
    ) -> str:  # fmt: skip
        """Queue a request to sample completions of ``prompt``, and return the request's name.

        Args:
            seed: seed of the first completion. The i-th completion, counted from 0, draws with seed + i.
            n: number of completions; default ``sampling.n``.
            spent: tokens of ``sampling.max_tokens`` that earlier turns of the conversation have used.
        """

    def advance(self) -> list[tuple[str, list[Sampled]]]:
        """Run one engine step. Return the name and the n completions of each request that finished in the step."""

    def load(self) -> Load:
        """Return the engine's present load."""

    def abort(self, requests: Iterable[str]) -> None:
        """Drop unfinished ``requests`` and their tokens. Names of finished requests are ignored."""

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        """Drop unfinished ``requests``, and return (name, completions so far) of each dropped request. Unfinished
        completions have the finish reason `ABORT`. Completions that were waiting to start have no tokens."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Sample completions of ``prompts``, and yield one `Group` per prompt. See `RolloutSource.generate`."""

    def take_counts(self) -> dict[str, float]:
        """Return counts by metric name, e.g. of accepted draft tokens. Each call sets the counts to 0."""

    def prompt_logprobs(self, prompt: ModelInput | Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of a prompt's P tokens except the first: [P - 1] float32, in nats."""

    def check(self, sampling: Sampling) -> None:
        """Raise a ValueError if the engine refuses these sampling settings."""

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
        """Run ``work`` on the engine's first rank, and return the result there. The engine's other ranks repeat the
        first rank's calls of vLLM, and return ``others``."""

    @property
    def tensors(self) -> VLLMTensors:
        """The tensors of the engine's model on this rank, by name. A weight sync writes into the tensors."""

    def invalidate(self) -> None:
        """Set ``version`` to None, because the weights are changing. `generate` fails until the next `stamp`."""

    def stamp(self, version: int) -> None:
        """Record that the weights are now of optimizer step ``version``. Drop cached results of older weights."""

    def require(self, version: int) -> None:
        """Raise `StaleWeights` unless the weights are of optimizer step ``version``."""

    def load_adapter(self, folder: str) -> None:
        """Load a LoRA adapter in peft's format into the engine's first slot. Every later request uses the adapter."""

    @property
    def adapter_is_active(self) -> bool:
        """Whether the engine's first LoRA slot holds the adapter of `load_adapter`."""

    def sleep(self) -> None:
        """Free the KV cache's memory until `wake`, and keep the weights. If ``sleeps`` is False, do nothing."""

    def wake(self) -> None:
        """Allocate an empty KV cache after `sleep`."""

    def describe(self) -> str:
        """Return one line for the log, e.g. with the model, its dtype, and the sizes of KV cache and weights."""

    def warnings(self, config: Any) -> Iterator[str]:
        """Yield the warnings about the engine that are printed when a run starts."""

    def close(self) -> None:
        """Free the engine's memory. Afterwards a new engine may be built in this process."""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Facts about a run that its engine needs, and that the configuration doesn't hold."""

    end_tokens: tuple[int, ...] = ()  # Token ids that end a completion, in addition to the checkpoint's end tokens.
    adapter: Adapter | None = None  # LoRA adapter that the engine serves. None without one.
    sequences: int = 0  # Maximum number of sequences in one generation or evaluation. 0 means unknown.
    trained: int = 0  # Maximum number of sequences in one generation of training. 0 means the value of ``sequences``.
    blank: bool = False  # Whether to skip the checkpoint's weights, because a weight sync writes all weights.
    tokens: int = 0  # Number of tokens in the tokenizer, often fewer than the model's embedding rows. 0 means unknown.
    policy: Policy | None = None  # The model that is trained. None for an engine without training, e.g. evaluation.
    prompts: Sequence[Any] = ()  # The run's datasets of prompts.
    has_tools: bool = False  # Whether tools may append tokens to a prompt.
    model_config: Any = None  # Transformers' configuration of the model. Needed if ``policy`` is None.


class EngineFeature:
    """An extension's change of `VLLMEngine`. Each method has a default without effect. A subclass overrides some."""

    blank = False  # whether vLLM is built without the checkpoint's weights, because a weight sync writes them

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arguments of `vllm.LLM` that extend or override ``arguments``, which contain the user's arguments."""
        return {}

    def while_built(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that is entered while vLLM is built."""
        return contextlib.nullcontext()

    def built(self, engine: Any) -> None:
        """Check or change the `VLLMEngine` that has just been built, or keep a reference to the engine."""

    def while_generating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that is entered during each call of `Engine.on_engine_leader`."""
        return contextlib.nullcontext()

    def request(self, prompt: ModelInput) -> Any:
        """Return ``prompt`` as an input of vLLM. None means that the prompt's token ids are the input."""

    def completions(self, request: str, prompt: ModelInput, output: Any, sampled: list[Sampled]) -> list[Sampled]:
        """Return ``sampled``, a request's completions, with data added from ``output``, vLLM's RequestOutput."""
        return sampled

    def scored(self, prompt: ModelInput, output: Any) -> None:
        """Check vLLM's RequestOutput ``output`` for ``prompt``. Called at the end of `Engine.prompt_logprobs`. Drop
        cached data that depend on the weights, because the weights may change before the next call."""

    def take_counts(self) -> dict[str, float]:
        """Return the feature's counts by metric name. Each call sets the counts to 0."""
        return {}

    def drop(self, request: str) -> None:
        """Drop all data of the request named ``request``, because the request has ended."""

    def forget(self) -> None:
        """Drop data computed with the engine's weights. Called after a weight sync, and before the engine sleeps."""

    def close(self) -> None:
        """Free the memory of the feature. Called when the engine is closed."""


@contextlib.contextmanager
def after_each_step(engine: Engine, work: Callable[[], Any]) -> Iterator[None]:
    engine.after_step.append(work)
    try:
        yield
    finally:
        engine.after_step.remove(work)


def stepping(engine: Engine, tell: Callable[[int], Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context that calls ``tell`` after each engine step with the number of sequences still running."""
    return after_each_step(engine, lambda: tell(engine.load().running))


def engine_features(config: GRPOConfig, use: EngineUse) -> tuple[EngineFeature, ...]:
    with on_all_ranks("the engine's features"):
        offers = (offer(config, use) for offer in hooks("engine_feature"))
        return tuple(feature for feature in offers if feature is not None)

"""`Engine`: the interface of an inference engine in the trainer's process, implemented by `VLLMEngine`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..batch import FinishReason, Group, ModelInput, Prompt, Rollout
from ..parallel.layout import RankLayout
from ..policy.packed_weights import PackedWeight
from ..riders import Rider
from .sampling import Sampling
from .tensors import LoRALayer as LoRALayer
from .tensors import VLLMTensors

T = TypeVar("T")


class StaleWeights(RuntimeError):
    """The error of sampling while the engine's weights are not from the trainer's present optimizer step."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion of C tokens, sampled by the engine."""

    ids: array[int]  # Token ids of the completion, [C] int32.
    logprobs: array[float]  # Log-probabilities of the sampled tokens in nats, [C] float32.
    finish_reason: FinishReason
    riders: tuple[Rider, ...] = ()  # Per-token data of extensions.

    def rollout(self, prompt: ModelInput, version: int) -> Rollout:
        """Return a `Rollout` of ``prompt`` and this completion, sampled by the weights of step ``version``."""
        return Rollout(
            input=prompt,
            completion_ids=self.ids,
            sampler_logprobs=torch.frombuffer(self.logprobs, dtype=torch.float32),
            sampled=torch.ones(len(self.ids), dtype=torch.bool),
            finish_reason=self.finish_reason,
            policy_version=version,
            riders=self.riders,
        )


EngineTensors = VLLMTensors  # type of `Engine.tensors`


class ServedWeights:
    """The policy's quantised weights that the engine's layers read in place. This base class has no such weights."""

    @property
    def weights(self) -> Sequence[PackedWeight]:
        return ()

    def unused(self, but: Collection[PackedWeight] = ()) -> int:
        """Count layers that have computed nothing since the engine was built, except layers of weights in ``but``."""
        return 0


class Engine(Protocol):
    """An inference engine that samples with the weights of one known optimizer step, and can free its KV cache."""

    layout: RankLayout
    version: int | None  # Optimizer step of the weights. None means that the step is unknown.
    context: int  # Maximum tokens of a sequence, prompt and completion together.
    vocab_size: int  # Vocabulary size of the loaded checkpoint.
    max_sequences: int  # Maximum number of sequences decoded at once. Further sequences wait in a queue.
    kv_tokens: int  # Capacity of the KV cache in tokens.
    weight_bytes: int  # Bytes of all weights.
    dtype: torch.dtype  # Dtype of weights and activations.
    blank: bool  # Whether the engine was built without reading weights. A weight sync writes all weights.
    sleeps: bool  # Whether `sleep` frees the KV cache's memory.
    asleep: bool  # Whether the KV cache is freed now.
    served: ServedWeights  # The policy's quantised weights that the engine reads in place.
    after_step: list[Callable[[], None]]  # Listeners that `advance` calls after each engine step, in list order.

    def submit(
        self, prompt: ModelInput | Sequence[int], sampling: Sampling, seed: int, *, n: int | None = None,
        spent: int = 0, streams: bool = False,
    ) -> str:  # fmt: skip
        """Queue a request to sample completions of ``prompt``, and return the request's name.

        Args:
            seed: seed of the first completion. The i-th completion, counted from 0, draws with seed + i.
            n: number of completions; default ``sampling.n``.
            spent: tokens of ``sampling.max_tokens`` that earlier turns of the conversation have used.
            streams: whether `written` returns the request's tokens after each engine step. Streaming needs n = 1.
        """

    def advance(self) -> list[tuple[str, list[Sampled]]]:
        """Run one engine step. Return the name and the n completions of each request that finished in the step."""

    def written(self) -> list[tuple[str, Sequence[int]]]:
        """Return (name, all token ids so far) of unfinished streaming requests that got tokens in the last engine step.

        The next engine step may append to the returned token ids.
        """

    def abort(self, requests: Iterable[str]) -> None:
        """Drop unfinished ``requests`` and their tokens. Names of finished requests are ignored."""

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        """Drop unfinished ``requests``, and return (name, completions so far) of each dropped request.

        Unfinished completions have the finish reason `ABORT`. Completions that were waiting to start have no tokens.
        """

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

    def check_processor(self, processor: Any) -> None:
        """Raise an error if the engine turns images into other inputs than the trainer's ``processor`` does."""

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
        """Run ``work`` on the engine's first rank. Other ranks repeat its calls of vLLM, and return ``others``."""

    @property
    def tensors(self) -> EngineTensors:
        """The tensors of the engine's model in this process, by name. A weight sync writes into the tensors."""

    def invalidate(self) -> None:
        """Set ``version`` to None, because the weights are changing. Sampling fails until the next `stamp`."""

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
        """Return one line for the log: the model, its dtype, KV cache tokens and bytes of weights."""

    def warnings(self, config: Any) -> Iterator[str]:
        """Yield the warnings about the engine that are printed when a run starts."""

    def close(self) -> None:
        """Free the engine's memory. Afterwards a new engine may be built in this process."""

"""`Engine`: the interface of an inference engine in the trainer's process. `VLLMEngine` implements it.

A new engine is a class with these members; `training/assembly.py` builds it.
"""

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
    """An attempt to sample with weights of another step than the trainer's."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion as sampled by the engine."""

    ids: array[int]  # [C] "i", token ids
    logprobs: array[float]  # [C] "f", log-probabilities in nats
    finish_reason: FinishReason
    riders: tuple[Rider, ...] = ()  # extensions' data on the tokens, e.g. their experts

    def rollout(self, prompt: ModelInput, version: int) -> Rollout:
        """Return a rollout of this completion of ``prompt``. It must have been sampled in one request."""
        return Rollout(
            input=prompt,
            completion_ids=self.ids,
            sampler_logprobs=torch.frombuffer(self.logprobs, dtype=torch.float32),
            sampled=torch.ones(len(self.ids), dtype=torch.bool),
            finish_reason=self.finish_reason,
            policy_version=version,
            riders=self.riders,
        )


EngineTensors = VLLMTensors  # another engine's tensors have the same members


class ServedWeights:
    """The policy's quantised weights that the engine's layers read in place; here none."""

    @property
    def weights(self) -> Sequence[PackedWeight]:
        return ()

    def unused(self, but: Collection[PackedWeight] = ()) -> int:
        """Count layers without any computation since the engine was built, except layers with a weight of ``but``."""
        return 0


class Engine(Protocol):
    """An inference engine that holds the weights of one known optimizer step, samples with them, and sleeps."""

    layout: RankLayout
    version: int | None  # the optimizer step of the weights; None: unknown
    context: int  # maximum tokens of a sequence, prompt and completion together
    vocab_size: int  # vocabulary size of the loaded checkpoint
    max_sequences: int  # maximum number of sequences decoded at once; others wait
    kv_tokens: int  # tokens that the whole KV cache holds
    weight_bytes: int  # bytes of all weights
    dtype: torch.dtype  # dtype of weights and activations
    blank: bool  # whether the engine was built without loading weights; a publish writes all weights
    sleeps: bool  # whether `sleep` frees the KV cache's memory
    asleep: bool  # whether the engine sleeps now
    served: ServedWeights  # the policy's quantised weights that the engine reads in place
    after_step: list[Callable[[], None]]  # called after each step, in this order

    # requests

    def submit(
        self, prompt: ModelInput | Sequence[int], sampling: Sampling, seed: int, *, n: int | None = None,
        spent: int = 0, streams: bool = False,
    ) -> str:  # fmt: skip
        """Queue a request, and return its name.

        Args:
            seed: seed of the first completion; the i-th one draws with seed + i.
            n: number of completions; default ``sampling.n``.
            spent: tokens of ``sampling.max_tokens`` that earlier turns have used.
            streams: whether `written` returns the request's tokens after each step; needs n = 1.
        """

    def advance(self) -> list[tuple[str, list[Sampled]]]:
        """Run one step, and return the requests that it finished, each with its n completions."""

    def written(self) -> list[tuple[str, Sequence[int]]]:
        """Return the streaming requests that got tokens in the last step and haven't finished.

        Each comes with all its tokens so far; the next step may append to this sequence.
        """

    def abort(self, requests: Iterable[str]) -> None:
        """Drop the ``requests`` that are in flight."""

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        """Drop the ``requests`` that are in flight, and return each with its completions so far, in order.

        Unfinished completions have the finish reason `ABORT`. Completions that were still waiting have no tokens.
        """

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Sample a group per prompt, see `RolloutSource.generate`."""

    def take_counts(self) -> dict[str, float]:
        """Return counters since the last call, such as the number of accepted drafts."""

    def prompt_logprobs(self, prompt: ModelInput | Sequence[int]) -> torch.Tensor:
        """Return log-probabilities of the tokens after the first, [P - 1] float32 in nats, with weights of any step."""

    def check(self, sampling: Sampling) -> None:
        """Raise a ValueError if the engine refuses these sampling settings."""

    def check_processor(self, processor: Any) -> None:
        """Raise an error if the engine reads images differently from the trainer's ``processor``."""

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
        """Run ``work`` on the engine's first rank; the others repeat its calls of the engine, and return ``others``."""

    # weights

    @property
    def tensors(self) -> EngineTensors:
        """The engine's tensors in this process. A publish writes them."""

    def invalidate(self) -> None:
        """Declare the weights' step unknown: nothing can be sampled before the next `stamp`."""

    def stamp(self, version: int) -> None:
        """Declare that the weights are from step ``version`` now, and drop everything computed with older weights."""

    def require(self, version: int) -> None:
        """Raise `StaleWeights` unless the weights are from step ``version``."""

    def load_adapter(self, folder: str) -> None:
        """Load an adapter in peft's format into the first slot. Every later request uses it."""

    @property
    def adapter_is_active(self) -> bool:
        """Whether the first slot still holds the loaded adapter."""

    # memory

    def sleep(self) -> None:
        """Free the KV cache's memory until `wake`, if `sleeps` is true. Weights stay in memory."""

    def wake(self) -> None:
        """Allocate an empty KV cache again."""

    def describe(self) -> str:
        """Return one line with model, dtype, KV tokens and memory."""

    def warnings(self, config: Any) -> Iterator[str]:
        """Yield warnings to print at the start."""

    def close(self) -> None:
        """Free the engine. Another one may be built in this process afterwards."""

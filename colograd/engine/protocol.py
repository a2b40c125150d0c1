"""`Engine`: everything that the trainer asks of an inference engine in its process. `VLLMEngine` is one.

Another engine is a class with these members, built in `training/assembly.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..batch import FinishReason, Group, KeptTokens, ModelInput, Prompt, Rollout, RoutedExperts
from ..parallel.layout import RankLayout
from ..policy.quantized_layers import PackedWeight
from .sampling import Sampling

T = TypeVar("T")


class StaleWeights(RuntimeError):
    """The engine was about to sample with weights that are not the trainer's present ones."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion, as the engine sampled it."""

    ids: array[int]  # [C] "i"
    logprobs: array[float]  # [C] "f", nats
    finish_reason: FinishReason
    experts: RoutedExperts | None = None  # of prompt and completion, with `router_replay`
    kept: KeptTokens | None = None  # where the distribution was truncated and that is recorded

    def rollout(self, prompt: ModelInput, version: int) -> Rollout:
        """The rollout of a completion that was sampled in one go behind ``prompt``."""
        return Rollout(
            input=prompt,
            completion_ids=self.ids,
            sampler_logprobs=torch.frombuffer(self.logprobs, dtype=torch.float32),
            sampled=torch.ones(len(self.ids), dtype=torch.bool),
            finish_reason=self.finish_reason,
            policy_version=version,
            experts=self.experts,
            kept=self.kept,
        )


class LoRALayer(Protocol):
    """A layer of the engine with slots for adapters."""

    def stacks(self, kind: str) -> Sequence[torch.Tensor]:
        """The present tensors of ``lora_A`` or ``lora_B``, one per fused part: [slots, 1, rows, columns]."""


class EngineTensors(Protocol):
    """The engine's tensors by name, and how a checkpoint's names become the engine's."""

    @property
    def fusions(self) -> Mapping[str, Sequence[str]]:
        """Parts of each fused layer: ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``."""

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """All parameters, each once, by the names they have without adapters."""

    def renamed(self, name: str) -> str:
        """A checkpoint's name of a tensor -> the engine's, before fusions."""

    def written_through(self, name: str, place: str | None = None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The function of a checkpoint's tensor that the engine holds; None: the tensor itself.

        Args:
            place: the engine's name of it, where `renamed` doesn't know it.
        """

    def expert_layout(self, name: str) -> str:
        """How a tensor of experts is laid out: "" as in a checkpoint, else the kernel whose layout it has."""

    def merged_outputs(self, name: str) -> Sequence[int]:
        """Outputs of each part of the layer that a tensor belongs to, which ranks cut one by one; empty: it has one."""

    def is_added_by_first_rank(self, bias: torch.Tensor) -> bool:
        """Whether a bias belongs to outputs that ranks add up, so that only the first rank adds it."""

    def lora_layers(self) -> Mapping[str, LoRALayer]:
        """The layers with slots for adapters, by name."""


class ServedWeights(Protocol):
    """The policy's quantised weights that the engine's layers multiply with, where they are."""

    @property
    def weights(self) -> Sequence[PackedWeight]: ...

    def unused(self, but: Collection[PackedWeight] = ()) -> int:
        """Layers that have computed nothing since the engine was built, other than those of some weights."""


class Engine(Protocol):
    """An inference engine that holds the weights of one known optimizer step, samples with them, and sleeps."""

    layout: RankLayout
    version: int | None  # the optimizer step of the weights; None: unknown
    context: int  # tokens of the longest sequence, prompt and completion together
    vocab_size: int  # tokens that the loaded checkpoint knows
    max_sequences: int  # decoded at once; others wait
    kv_tokens: int  # of the whole KV cache
    weight_bytes: int
    dtype: torch.dtype  # of weights and activations
    blank: bool  # no weights were loaded: a publish writes all of them
    sleeps: bool  # `sleep` frees the KV cache's memory
    asleep: bool
    after_step: Callable[[], None] | None  # called after each step

    # requests

    def submit(
        self, prompt: ModelInput | Sequence[int], sampling: Sampling, seed: int, *, n: int | None = None,
        spent: int = 0, streams: bool = False,
    ) -> str:  # fmt: skip
        """Queue a request; returns its name.

        Args:
            seed: of the first completion; the i-th draws with seed + i.
            n: completions; default ``sampling.n``.
            spent: tokens of ``sampling.max_tokens`` that earlier turns have used.
            streams: `written` has its tokens after each step; of one completion.
        """

    def advance(self) -> list[tuple[str, list[Sampled]]]:
        """Run one step; returns the requests that it finished, each with its n completions."""

    def written(self) -> list[tuple[str, Sequence[int]]]:
        """Requests that stream and that the last step has added to, without finishing them, with all tokens so far; the
        next step may append to them."""

    def abort(self, requests: Iterable[str]) -> None:
        """Drop requests that are in flight."""

    def stop(self, requests: Iterable[str]) -> list[tuple[str, list[Sampled]]]:
        """Drop requests that are in flight; returns each with what its completions have so far, those that hadn't ended
        with the reason `ABORT` and, if they waited, without a token. In order."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """See `RolloutSource.generate`."""

    def take_counts(self) -> dict[str, float]:
        """Metrics that add up, such as accepted drafts, since the last call."""

    def prompt_logprobs(self, prompt: ModelInput | Sequence[int]) -> torch.Tensor:
        """Log-probabilities [P - 1] float32, in nats, of each token after the first, whatever the weights' step."""

    def check(self, sampling: Sampling) -> None:
        """Raise a ValueError for sampling settings that the engine refuses."""

    def check_processor(self, processor: Any) -> None:
        """Raise an error if the engine would read images otherwise than the trainer's ``processor``."""

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
        """Run ``work`` on the first of the engine's ranks while the others follow it, and return ``others``."""

    # weights

    @property
    def tensors(self) -> EngineTensors:
        """The engine's tensors in this process, which a publish writes."""

    @property
    def served(self) -> ServedWeights: ...

    def invalidate(self) -> None:
        """Declare the weights' step unknown: nothing can be sampled before the next `stamp`."""

    def stamp(self, version: int) -> None:
        """Declare that the weights are now those of step ``version``; forget everything computed with older ones."""

    def require(self, version: int) -> None:
        """Raise `StaleWeights` unless the weights are those of step ``version``."""

    def load_adapter(self, folder: str) -> None:
        """Load an adapter, as peft saves it, into the first slot; every request uses it from now on."""

    @property
    def adapter_is_active(self) -> bool:
        """Whether the first slot still is the loaded adapter's."""

    # memory

    def sleep(self) -> None:
        """Free the KV cache's memory until `wake`, if the engine `sleeps`. Weights stay."""

    def wake(self) -> None:
        """Allocate the KV cache again, empty."""

    def describe(self) -> str:
        """One line: model, dtype, KV tokens, memory."""

    def warnings(self, config: Any) -> Iterator[str]:
        """Lines that the user should see at start."""

    def close(self) -> None:
        """Free the engine; another may be built in this process afterwards."""

"""The types that data has on its way from a prompt to an optimizer step. Imports torch only.

    prompts -> Rollout -> Group -> ScoredGroup -> StepBatch[MicroBatch ...] -> LossOutput

One type per stage; a field is there from the start or belongs to a later type. Shape letters: P prompt tokens, C
completion tokens, G completions of a group, R reward functions, T tokens of a packed row, N predicted completion tokens
of a micro-batch, S segments of a packed row, M micro-batches of a step.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


class FinishReason(str, enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    """The model ended it: an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """It reached the token limit: it is truncated."""
    ABORT = "abort"
    """The trainer no longer needed it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the queue: the dataset's row, its tokens, and its place in the stream of prompts.

    ``position`` counts prompts over the whole run and all ranks, so a request's seed depends on neither the number of
    ranks nor the batch it falls into.
    """

    example: dict[str, Any]
    prompt_ids: tuple[int, ...]  # [P]
    position: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion, with what the sampler knew of it."""

    prompt_ids: tuple[int, ...]  # [P]
    completion_ids: tuple[int, ...]  # [C] as sampled, never re-tokenised
    sampler_logprobs: torch.Tensor  # [C] float32, nats, of the sampled token at the sampling temperature
    sampled: torch.Tensor  # [C] bool; False: a tool wrote the token, the loss ignores it
    finish_reason: FinishReason
    policy_version: int  # the optimizer step whose weights sampled it
    messages: tuple[dict[str, Any], ...] = ()  # of a conversation: all that followed the prompt; else the text says it
    columns: Mapping[str, Any] = field(default_factory=dict)  # its own keywords for reward functions


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt. All are sampled and scored on one rank; another may train them."""

    example: dict[str, Any]
    rollouts: tuple[Rollout, ...]  # [G]
    position: int  # of the prompt in the stream


@dataclass(frozen=True, slots=True)
class Logged:
    """What reward functions said of a group beside its rewards."""

    columns: dict[str, tuple[Any, ...]]  # [G] values of each further column of the completions table
    metrics: dict[str, tuple[float, int]]  # sum and number of the values of each


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards and advantages."""

    group: Group
    rewards: torch.Tensor  # [G, R] float32; NaN: that function abstained
    advantages: torch.Tensor  # [G] float32, one per completion, or [sum C] one per completion token
    logged: Logged = field(default_factory=lambda: Logged({}, {}))


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Which tokens of a packed row see which: each segment sees itself (causally) and the earlier segments it names.

    Example: one prompt of 3 tokens with two completions of 2 and 4 tokens that share it:

        lengths = (3, 2, 4)    sees = ((), (0,), (0,))
        row:      p p p | a a | b b b b
        position: 0 1 2   3 4   3 4 5 6
    """

    lengths: tuple[int, ...]  # [S] tokens, in the order of the row
    sees: tuple[tuple[int, ...], ...]  # [S] indices of earlier segments, in the order of their keys

    @property
    def starts(self) -> tuple[int, ...]:
        """[S] index in the row of each segment's first token."""
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return tuple(starts)

    @property
    def num_tokens(self) -> int:
        """T: the length of the row."""
        return sum(self.lengths)

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.sees), (len(self.lengths), len(self.sees))
        for index, seen in enumerate(self.sees):
            assert all(0 <= s < index for s in seen), f"segment {index} sees {seen}: only earlier segments can be seen"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward sees: one packed row without padding.

    The [N] tensors are aligned with each other: one entry per completion token that the row predicts.
    """

    input_ids: torch.Tensor  # (1, T) int64
    position_ids: torch.Tensor  # (1, T) int64
    layout: SegmentLayout
    predictors: torch.Tensor  # (N,) int64: the place in the row whose hidden state predicts the label
    labels: torch.Tensor  # (N,) int64
    loss_mask: torch.Tensor  # (N,) float32, 1: the token counts in the loss
    sequence: torch.Tensor  # (N,) int64: which completion of this row the token belongs to, 0 ... num_sequences-1
    sampler_logprobs: torch.Tensor  # (N,) float32
    advantages: torch.Tensor  # (N,) float32
    old_logprobs: torch.Tensor | None  # (N,) float32; None exactly when the rollouts are on-policy
    ref_logprobs: torch.Tensor | None  # (N,) float32; None exactly when beta == 0
    num_sequences: int  # completions in this row


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's work on this rank, with the step's global denominators."""

    micro_batches: tuple[MicroBatch, ...]  # [M], M equal on all ranks where these must step together
    num_loss_tokens: int  # tokens in the loss, over all ranks and groups, packed or not
    num_sequences: int  # completions, likewise
    metrics: dict[str, float]  # reduced over ranks: what was known before training
    first_of_round: bool  # whether its rollouts were sampled by the weights it trains
    groups: tuple[ScoredGroup, ...]  # what the micro-batches hold: they can be packed again under another budget


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss says of one micro-batch."""

    loss: torch.Tensor  # () the unnormalised SUM; the step's denominator is applied once, by the trainer
    sums: dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # metric -> (sum, count)
    minima: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

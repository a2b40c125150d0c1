"""The types of the data on its way from a prompt to an optimizer step. Imports torch only.

    Prompt -> Rollout -> Group -> ScoredGroup -> SampledStep -> StepBatch[PackedRow ...] -> MicroBatch -> LossOutput

Each stage has one frozen type. A field is set when the object is made, or belongs to a later type. Shape letters:
P prompt tokens, C completion tokens, G completions of a group, R reward functions, T tokens of a packed row,
N predicted completion tokens of a micro-batch, S segments of a packed row, M micro-batches of a step.

All examples show the same group: the prompt "2 + 2 =" is the tokens 11 12 13, and its two completions are "4" (21, then
the end token 2) and "I say 5" (22 23 24 2). The only reward function gives them 1 and 0.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .riders import Media, Rider, RowRider
from .riders import first as first_rider


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model ended it: an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """It reached the token limit: it is truncated."""
    REPETITION = "repetition"
    """vLLM's `repetition_detection` ended it: it is truncated."""
    ABORT = "abort"
    """The trainer no longer needed it."""

    @property
    def is_truncated(self) -> bool:
        return self in (FinishReason.LENGTH, FinishReason.REPETITION)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The model's input: tokens, and the media among them.

    Completions share a prompt in a packed row exactly if their inputs are equal, so all fields must be hashable and
    comparable.

        ModelInput(ids=(11, 12, 13))
    """

    ids: tuple[int, ...]  # [P] tokens; an image takes one per feature
    media: Media | None = None

    def __len__(self) -> int:
        """Return P, the number of tokens."""
        return len(self.ids)

    def followed_by(self, ids: Sequence[int], media: Media | None = None) -> ModelInput:
        """Return the engine's input for a further turn: this input, then ``ids``.

        Args:
            ids: tokens behind this input.
            media: content among ``ids`` that isn't text, with places in ``ids``.
        """
        last = media or self.media
        return ModelInput((*self.ids, *ids), None if last is None else last.followed_by(self, ids, media))

    @property
    def images(self) -> Any:
        """The former name of `media`, for users' code."""
        return self.media

    @property
    def key(self) -> str:
        """A digest of tokens and media: the same in every process, and in each epoch of a run."""
        media = b"" if self.media is None else self.media.digest.encode()
        return hashlib.blake2b(array("q", self.ids).tobytes() + media, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class RolloutId:
    """The identity of a completion in a run. Two completions of equal tokens have two identities."""

    position: int  # position of its prompt in the stream of prompts
    index: int  # index of the completion in its group


class _Asked:
    """The base of prompts and completions: an object with an ``input``."""

    __slots__ = ()
    input: ModelInput

    def __post_init__(self) -> None:
        """Convert plain ids, as users write them."""
        if not isinstance(self.input, ModelInput):
            object.__setattr__(self, "input", ModelInput(tuple(self.input)))
        ids = getattr(self, "completion_ids", None)
        if ids is not None and not isinstance(ids, array):
            object.__setattr__(self, "completion_ids", array("i", ids))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """[P]"""
        return self.input.ids


@dataclass(frozen=True, slots=True)
class Prompt(_Asked):
    """A prompt in the queue: the dataset's row, the model's input, and the position in the stream of prompts.

    ``position`` counts prompts over the whole run and all ranks, so a request's seed depends on neither the number of
    ranks nor its batch.

        Prompt({"prompt": "2 + 2 =", "answer": "4"}, ModelInput((11, 12, 13)), position=0)
    """

    example: dict[str, Any]
    input: ModelInput  # or [P] ids, which are converted
    position: int


TEACHER = "teacher"  # the dataset's column that names a prompt's teacher, in a run with several


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive tokens of a rollout that is a tree. An agent's session is one: its contexts share beginnings.

    A rollout's branches lie one after the other in its completion, each somewhere behind its parent. Here the agent
    called the model behind the whole prompt 11 12 13 (branch 0) and continued (1). Then it called the model again with
    a shorter context, the prompt's first two tokens (2):

        completion_ids   21 22 | 31 32 | 41 42
        branches         Branch(2, prompt=3), Branch(2, after=0), Branch(2, prompt=2)
    """

    length: int  # tokens
    after: int | None = None  # index of the parent branch, continued at its end; None: the prompt is the parent
    prompt: int = 0  # number of the prompt's tokens that the branch sees, if the prompt is its parent


@dataclass(frozen=True, slots=True)
class Rollout(_Asked):
    """One completion, with the sampler's record.

    The second completion, with the log-probability of each token given all tokens before it:

        input.ids         11 12 13
        completion_ids              22   23   24    2
        sampler_logprobs          -1.2 -0.3 -0.9 -0.1
    """

    input: ModelInput  # or [P] ids, which are converted
    completion_ids: array[int]  # [C] "i", as sampled, never re-tokenised; any sequence of ids is converted
    sampler_logprobs: torch.Tensor  # [C] float32, nats, sampled tokens' log-probabilities at the sampling temperature
    sampled: torch.Tensor  # [C] bool; False: a tool wrote the token, the loss ignores it
    finish_reason: FinishReason
    policy_version: int  # optimizer step of the weights in the round that trains it
    messages: tuple[dict[str, Any], ...] = ()  # a conversation's messages behind the prompt; (): the completion is text
    columns: Mapping[str, Any] = field(default_factory=dict)  # this completion's keywords for reward functions
    branches: tuple[Branch, ...] = ()  # branches of a tree; (): each token sees the prompt and all tokens before it
    riders: tuple[Rider, ...] = ()  # further data of extensions

    def get(self, kind: type[T]) -> T | None:
        """Return the first rider of a class, or None."""
        return first_rider(self.riders, kind)

    def all(self, kind: type[T]) -> tuple[T, ...]:
        """Return the riders of a class."""
        return tuple(rider for rider in self.riders if isinstance(rider, kind))

    def carrying(self, *riders: Rider) -> Rollout:
        """Return the rollout with further riders."""
        return dataclasses.replace(self, riders=(*self.riders, *riders))

    @property
    def tree(self) -> tuple[Branch, ...]:
        """The branches. A rollout that is no tree has one, the whole completion."""
        return self.branches or (Branch(len(self.completion_ids), prompt=len(self.input)),)

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """Number of tokens before each branch of the `tree` that the branch's tokens see."""
        lengths: list[int] = []
        for branch in self.tree:
            parent = branch.after
            lengths.append(branch.prompt if parent is None else lengths[parent] + self.tree[parent].length)
        return tuple(lengths)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of all sequences of the tree: each leaf with the tokens that it sees."""
        within = {branch.after for branch in self.tree}
        ends = (i for i in range(len(self.tree)) if i not in within)
        return sum(self.context_lengths[i] + self.tree[i].length for i in ends)


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt. One rank samples and scores the group; another may train it.

    The first prompt's two completions:

        rollouts       21 2 | 22 23 24 2
        rollout_ids    (0, 0), (0, 1)
    """

    example: dict[str, Any]
    rollouts: tuple[Rollout, ...]  # [G]
    position: int  # position of the prompt in the stream of prompts

    @property
    def rollout_ids(self) -> tuple[RolloutId, ...]:
        """[G]"""
        return tuple(RolloutId(self.position, index) for index in range(len(self.rollouts)))


@dataclass(frozen=True, slots=True)
class Logged:
    """Values that reward functions logged for a group in addition to its rewards."""

    columns: dict[str, tuple[Any, ...]]  # column of the completions table -> [G] values
    metrics: dict[str, tuple[float, int]]  # metric -> (sum, number of values)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards and advantages.

    A group of two completions, of 2 and 4 tokens, with one reward function:

        rewards       [[1.0], [0.0]]
        advantages    [0.71, -0.71], or 2 + 4 values if each token has its own
    """

    group: Group
    rewards: torch.Tensor  # [G, R] float32; NaN: that function abstained
    advantages: torch.Tensor  # [G] float32, one per completion, or [sum C] one per completion token
    logged: Logged = field(default_factory=lambda: Logged({}, {}))

    def for_training(self) -> ScoredGroup:
        """Return a copy to send to another rank, without the fields that only rewards and logs read."""
        inputs: dict[ModelInput, ModelInput] = {}  # a prompt's completions share one object, on the receiver too
        rollouts = []
        for rollout in self.group.rollouts:
            if (prompt := rollout.input) not in inputs:
                media = None if prompt.media is None else prompt.media.for_training()
                inputs[prompt] = dataclasses.replace(prompt, media=media)
            riders = tuple(rider.for_training() for rider in rollout.riders)
            rollouts.append(dataclasses.replace(rollout, messages=(), columns={}, input=inputs[prompt], riders=riders))
        example = {name: value for name, value in self.group.example.items() if name == TEACHER}
        group = dataclasses.replace(self.group, example=example, rollouts=tuple(rollouts))
        # Clones, because a view would be sent with its whole storage.
        return ScoredGroup(group, self.rewards.clone(), self.advantages.clone())


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The groups of one optimizer step on this rank. `kept` and `sampled` differ with dynamic sampling only."""

    kept: tuple[ScoredGroup, ...]  # groups of the step: its denominators count them
    sampled: tuple[ScoredGroup, ...]  # this step's share of all sampled groups: metrics and logs count them


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The attention between a packed row's segments: each sees itself (causally) and the earlier segments it names.

    Both completions see the prompt:

        row        11 12 13 | 21  2 | 22 23 24  2
        lengths    (3, 2, 4)
        attends_to       ((), (0,), (0,))
    """

    lengths: tuple[int, ...]  # [S] tokens of each segment, in the order of the row
    attends_to: tuple[tuple[int, ...], ...]  # [S] indices of the earlier segments that each sees, in key order

    @property
    def starts(self) -> tuple[int, ...]:
        """[S] index of each segment's first token in the row."""
        return tuple(itertools.accumulate(self.lengths, initial=0))[:-1]

    @property
    def num_tokens(self) -> int:
        """T: the row's length in tokens."""
        return sum(self.lengths)

    @property
    def longest_sequence(self) -> int:
        """Maximum over the segments of their tokens plus the tokens they attend to."""
        seen = zip(self.lengths, self.attends_to, strict=True)
        return max(own + sum(self.lengths[s] for s in earlier) for own, earlier in seen)

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.attends_to), (len(self.lengths), len(self.attends_to))
        for index, seen in enumerate(self.attends_to):
            assert all(0 <= s < index for s in seen), f"segment {index} sees {seen}: only earlier segments can be seen"


@dataclass(frozen=True, slots=True)
class StepConstants:
    """Values of the whole step that the entropy and router terms of a loss need (see `losses.entropy`)."""

    coefficient: float = 0.0  # the entropy bonus's coefficient in this step
    denominator: float = 1.0  # the step's denominator: the trainer divides the sum by it
    threshold: float | None = None  # nats, the top-entropy quantile; None: the micro-batch is the whole step
    tokens: float | None = None  # tokens in the mean of the bonus; None: as above
    sequence_tokens: float | None = None  # tokens of all sequences with their prompts; None: as above


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Some completions of one group with their prompt: the unit of packing."""

    ids: tuple[RolloutId, ...]
    rollouts: tuple[Rollout, ...]
    advantages: tuple[torch.Tensor, ...]  # one tensor per rollout, () or [C]
    example: Mapping[str, Any] = field(default_factory=dict)  # the group's

    @property
    def num_tokens(self) -> int:
        return len(self.rollouts[0].input) + sum(len(r.completion_ids) for r in self.rollouts)


FIELDS = ("old_logprobs", "ref_logprobs")  # [N] fields of a row; other values for its labels are in `scores`


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The content of one micro-batch, without a copy of its tokens.

    `packing.collate` copies them when a forward needs the row. So a step's tokens are in memory once, as they were
    sampled, and none wait on the device."""

    parts: tuple[PackedGroup, ...]
    mask_truncated: bool
    device: torch.device  # device of the forward
    old_logprobs: torch.Tensor | None = None  # (N,) float32 on the device; see MicroBatch
    ref_logprobs: torch.Tensor | None = None  # (N,) float32 on the device
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)  # (N, ...) by name; see MicroBatch
    step_constants: StepConstants = StepConstants()

    def values(self, name: str) -> torch.Tensor | None:
        """Return an [N] field, or one of the `scores`."""
        return getattr(self, name) if name in FIELDS else self.scores.get(name)

    def with_values(self, name: str, values: torch.Tensor) -> PackedRow:
        if name in FIELDS:
            return dataclasses.replace(self, **{name: values})
        return dataclasses.replace(self, scores={**self.scores, name: values})

    @property
    def num_tokens(self) -> int:
        """T: the row's length in tokens."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the row's sequences, each with its prompt."""
        return sum(rollout.sequence_tokens for part in self.parts for rollout in part.rollouts)

    @property
    def rollouts(self) -> tuple[RolloutId, ...]:
        """The completions in this row, in the row's order."""
        return tuple(identity for part in self.parts for identity in part.ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward: one packed row without padding.

    The [N] tensors are aligned with each other: one entry per completion token that the row predicts.

        input_ids       11 12 13 | 21  2 | 22 23 24  2
        position_ids     0  1  2 |  3  4 |  3  4  5  6
        logit_positions       2  3 |  2  5  6  7                hidden states at these places predict ...
        labels          21  2 | 22 23 24  2                ... these tokens
        sequence         0  0 |  1  1  1  1                index into rollouts = (0, 0), (0, 1)
    """

    input_ids: torch.Tensor  # (1, T) int64
    position_ids: torch.Tensor  # (1, T) int64
    layout: SegmentLayout
    logit_positions: torch.Tensor  # (N,) int64: index in the row of the hidden state that predicts the label
    labels: torch.Tensor  # (N,) int64
    loss_mask: torch.Tensor  # (N,) float32, 1: the token counts in the loss
    sequence: torch.Tensor  # (N,) int64: index of the token's completion in this row, 0 ... num_sequences-1
    sampler_logprobs: torch.Tensor  # (N,) float32
    advantages: torch.Tensor  # (N,) float32
    old_logprobs: torch.Tensor | None  # (N,) float32; None exactly when the rollouts are on-policy
    ref_logprobs: torch.Tensor | None  # (N,) float32; None exactly when beta == 0
    rollouts: tuple[RolloutId, ...]  # the completions in this row, in the row's order
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)  # (N, ...) by `second_models.KINDS`: of teachers
    step_constants: StepConstants = StepConstants()
    in_loss: bool = True  # whether any token counts in the loss, known without a device sync
    completion_lengths: tuple[int, ...] = ()  # tokens of each completion
    media: Mapping[int, tuple[Any, ...]] | None = None  # segment -> media, with places in it; None: only text
    riders: tuple[RowRider, ...] = ()  # further data of extensions
    host_positions: torch.Tensor | None = None  # (N,) logit_positions on the host, for ranks that share the row

    def get(self, kind: type[T]) -> T | None:
        """Return the rider of a class, or None."""
        return first_rider(self.riders, kind)

    def candidates(self, device: torch.device, first: int = 0) -> Any:
        """Return the labels' candidate tokens, or None for the whole vocabulary; see `RowRider.candidates`."""
        found = (rider.candidates(device, first) for rider in self.riders)
        return next((each for each in found if each is not None), None)

    def for_other_models(self) -> MicroBatch:
        """Return the row as models read it that aren't the policy."""
        return dataclasses.replace(self, riders=tuple(rider for rider in self.riders if not rider.OF_POLICY))

    @property
    def num_sequences(self) -> int:
        """Number of completions in this row."""
        return len(self.rollouts)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's work on this rank, with the step's global denominators.

    With only the example's group, on one rank: num_loss_tokens = 6, num_sequences = 2.
    """

    rows: tuple[PackedRow, ...]  # [M] one per micro-batch; M is equal on ranks that must step together
    num_loss_tokens: int  # tokens in the loss, over all ranks and groups, packed or not
    num_sequences: int  # completions, over all ranks and groups, packed or not
    metrics: dict[str, float]  # metrics known before training, reduced over ranks
    groups: tuple[ScoredGroup, ...]  # content of the rows, to pack them again under another budget
    version: int = 0  # optimizer step of the weights that it trains
    counted: bool = True  # False: another rank has the same rows, and sums over ranks count them there
    trained: int = 0  # number of first rows with gradients made before sampling ended
    trained_metrics: Any = None  # their `Metrics`


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss and metrics of one micro-batch."""

    loss: torch.Tensor  # () the unnormalised SUM; the step's denominator is applied once, by the trainer
    sums: dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # metric -> (sum, count)
    minima: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

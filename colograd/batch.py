"""The types of the data on its way from a prompt to an optimizer step.

    Prompt -> Rollout -> Group -> ScoredGroup -> SampledStep -> StepBatch[PackedRow ...] -> MicroBatch -> LossOutput

Shape letters: P prompt tokens, C completion tokens, G completions of a group, R reward functions, T tokens of a packed
row, N predicted completion tokens of a micro-batch, S segments of a packed row, M micro-batches of a step.

All examples in this file show one group. The prompt "2 + 2 =" has the tokens 11 12 13. The first completion, "4", has
the tokens 21 and 2 (the end token) and the reward 1. The second, "I say 5", has 22 23 24 2 and the reward 0.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .riders import Media, Rider, RowRider, Segment, WithMedia
from .riders import first as first_rider


class FinishReason(enum.StrEnum):
    """The reason why a completion ended."""

    STOP = "stop"
    """The model ended the completion by an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The completion reached the token limit and counts as truncated."""
    REPETITION = "repetition"
    """vLLM's `repetition_detection` ended the completion. It counts as truncated."""
    ABORT = "abort"
    """The completion was stopped before its end, e.g. because the trainer no longer needed it."""

    @property
    def is_truncated(self) -> bool:
        return self in (FinishReason.LENGTH, FinishReason.REPETITION)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInput(WithMedia):
    """A prompt as the model reads it: token ids, and images or other media with their positions among the tokens.

    Completions share one copy of their prompt in a packed row only if their `ModelInput`s are equal.

        ModelInput(ids=(11, 12, 13))
    """

    ids: tuple[int, ...]  # Token ids of the prompt, [P].
    media: Media | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def key(self) -> str:
        """A hexadecimal digest of all fields. Equal inputs have equal keys in every process."""
        return hashlib.blake2b(array("q", self.ids).tobytes() + self.content, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class RolloutId:
    """The identity of a completion in a run. Two completions with equal tokens have different identities."""

    position: int  # Position of the completion's prompt in the run's stream of prompts.
    index: int  # Index of the completion in its group.


class _WithPrompt:
    __slots__ = ()
    input: ModelInput

    def __post_init__(self) -> None:  # Convert plain lists, which a user may pass.
        if not isinstance(self.input, ModelInput):
            object.__setattr__(self, "input", ModelInput(tuple(self.input)))
        ids = getattr(self, "completion_ids", None)
        if ids is not None and not isinstance(ids, array):
            object.__setattr__(self, "completion_ids", array("i", ids))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids, [P]."""
        return self.input.ids


@dataclass(frozen=True, slots=True)
class Prompt(_WithPrompt):
    """A prompt to sample: the dataset's row, the model's input, and the position in the stream of prompts.

    ``position`` counts prompts over the whole run and all ranks. Sampling seeds are derived from ``position``.

        Prompt({"prompt": "2 + 2 =", "answer": "4"}, ModelInput((11, 12, 13)), position=0)
    """

    example: dict[str, Any]
    input: ModelInput  # A list of [P] token ids is converted to a `ModelInput`.
    position: int


TEACHER = "teacher"  # Dataset column with the name of the prompt's teacher model, in a run with several teachers.


@dataclass(frozen=True, slots=True)
class Rollout(_WithPrompt):
    """One completion with the data that sampling recorded.

    Example: the completion 22 23 24 2. Each log-probability belongs to the token above it, given all earlier tokens:

        input.ids         11 12 13
        completion_ids              22   23   24    2
        sampler_logprobs          -1.2 -0.3 -0.9 -0.1
    """

    input: ModelInput  # The prompt. A list of [P] token ids is converted to a `ModelInput`.
    completion_ids: array[int]  # Token ids of the completion, [C], as sampled (never decoded and tokenised again).
    sampler_logprobs: torch.Tensor  # vLLM's log-probabilities at its temperature, [C] float32 nats. NaN: unknown.
    sampled: torch.Tensor  # Mask, [C] bool. False: the model didn't write the token, so the loss ignores it.
    finish_reason: FinishReason
    policy_version: int  # Number of optimizer steps of the engine's weights when the group was finished.
    messages: tuple[dict[str, Any], ...] = ()  # Messages of a conversation, without the prompt's. Empty for plain text.
    columns: Mapping[str, Any] = field(default_factory=dict)  # Columns of this completion for the reward functions.
    riders: tuple[Rider, ...] = ()  # Riders: data of extensions that travels with the completion.

    def get(self, kind: type[T]) -> T | None:
        return first_rider(self.riders, kind)

    def all(self, kind: type[T]) -> tuple[T, ...]:
        return tuple(rider for rider in self.riders if isinstance(rider, kind))

    def carrying(self, *riders: Rider) -> Rollout:
        return dataclasses.replace(self, riders=(*self.riders, *riders))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The parts into which a rider (extension data) divides the completion. One part if no rider divides it."""
        divided = next(filter(None, (rider.segments() for rider in self.riders)), None)
        return divided or (Segment(len(self.input), len(self.completion_ids)),)

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of the completion's sequences, prompt included.

        A completion is one sequence, unless a rider divides it. Tokens that sequences share count in each sequence."""
        return sum(one.context + one.length for one in self.segments if one.ends)


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt. One rank samples and scores a group; a different rank may train the group.

    Example: the two completions of the prompt at position 0:

        rollouts       21 2 | 22 23 24 2
        rollout_ids    (0, 0), (0, 1)
    """

    example: dict[str, Any]
    rollouts: tuple[Rollout, ...]  # Completions of the group, [G].
    position: int  # Position of the prompt in the run's stream of prompts.

    @property
    def rollout_ids(self) -> tuple[RolloutId, ...]:
        """The identities of the group's completions, [G]."""
        return tuple(RolloutId(self.position, index) for index in range(len(self.rollouts)))


@dataclass(frozen=True, slots=True)
class Logged:
    """Values that reward functions logged for a group in addition to its rewards."""

    columns: dict[str, tuple[Any, ...]]  # Column of the completions log -> one value per completion, [G].
    metrics: dict[str, tuple[float, int]]  # Metric name -> (sum, number of values).


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards and advantages.

    A group of two completions, of 2 and 4 tokens, with one reward function:

        rewards       [[1.0], [0.0]]
        advantages    [0.71, -0.71], or 2 + 4 values if the advantage differs from token to token
    """

    group: Group
    rewards: torch.Tensor  # Rewards, [G, R] float32. NaN means that the reward function abstained.
    advantages: torch.Tensor  # Advantages, float32: [G] one per completion, or [sum of C] one per completion token.
    logged: Logged = field(default_factory=lambda: Logged({}, {}))

    def for_training(self) -> ScoredGroup:
        """Return a copy for a rank that trains the group, without the data that only rewards and logs read."""
        inputs: dict[ModelInput, ModelInput] = {}  # One object per prompt, so that pickle sends it once.
        rollouts = []
        for rollout in self.group.rollouts:
            if (prompt := rollout.input) not in inputs:
                inputs[prompt] = prompt.for_training()
            riders = tuple(rider.for_training() for rider in rollout.riders)
            rollouts.append(dataclasses.replace(rollout, messages=(), columns={}, input=inputs[prompt], riders=riders))
        example = {name: value for name, value in self.group.example.items() if name == TEACHER}
        group = dataclasses.replace(self.group, example=example, rollouts=tuple(rollouts))
        # `clone`, because pickling a view would send the view's whole storage.
        return ScoredGroup(group, self.rewards.clone(), self.advantages.clone())


@dataclass(frozen=True, slots=True)
class SampledStep:
    """This rank's groups: those sampled for one optimizer step (``sampled``), and those trained in it (``kept``)."""

    kept: tuple[ScoredGroup, ...]  # Groups that the step trains. The loss denominators count them.
    sampled: tuple[ScoredGroup, ...]  # Groups sampled for the step, trained or not. Metrics and logs count them.


# Not frozen: torch 2.11 recompiles a layer for each new field value of an argument that is a frozen dataclass.
@dataclass(unsafe_hash=True, slots=True)
class SegmentLayout:
    """The segments (prompts, completions, or parts of them) of a packed row, and the earlier segments each attends to.

    Inside a segment attention is causal. Example: two completions attend to segment 0, the prompt:

        row        11 12 13 | 21  2 | 22 23 24  2
        lengths    (3, 2, 4)
        attends_to ((), (0,), (0,))
    """

    lengths: tuple[int, ...]  # Number of tokens of each segment, [S], in the order of the row.
    attends_to: tuple[tuple[int, ...], ...]  # Per segment, [S]: indices of the earlier segments that it attends to.

    @property
    def starts(self) -> tuple[int, ...]:
        """For each segment the position of its first token in the row, [S]."""
        return tuple(itertools.accumulate(self.lengths, initial=0))[:-1]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest sequence: a segment plus the earlier segments that it attends to."""
        seen = zip(self.lengths, self.attends_to, strict=True)
        return max(own + sum(self.lengths[s] for s in earlier) for own, earlier in seen)

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.attends_to), (len(self.lengths), len(self.attends_to))
        for index, seen in enumerate(self.attends_to):
            assert all(0 <= s < index for s in seen), f"segment {index} sees {seen}: only earlier segments can be seen"


@dataclass(frozen=True, slots=True)
class StepConstants:
    """Values of the whole optimizer step that some terms of a micro-batch's loss need.

    None: the loss doesn't need the value, or computes it from the micro-batch, which is the step's only one."""

    coefficient: float = 0.0  # Coefficient of the entropy bonus in this step.
    denominator: float = 1.0  # Number that divides the step's loss sum.
    threshold: float | None = None  # Entropy in nats above which `top_entropy_quantile` selects a token.
    tokens: float | None = None  # Number of tokens over which the entropy bonus is averaged.
    sequence_tokens: float | None = None  # Number of tokens of the step's sequences, prompts included.


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """One prompt with some or all completions of its group. Packing places a `PackedGroup` in one row as a unit."""

    ids: tuple[RolloutId, ...]
    rollouts: tuple[Rollout, ...]
    advantages: tuple[torch.Tensor, ...]  # One tensor per completion: () or, per token, [C].
    example: Mapping[str, Any] = field(default_factory=dict)  # The dataset's row of the prompt.

    @property
    def num_tokens(self) -> int:
        return len(self.rollouts[0].input) + sum(len(r.completion_ids) for r in self.rollouts)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The completions of one micro-batch, before `packing.collate` copies their tokens to the device."""

    parts: tuple[PackedGroup, ...]
    mask_truncated: bool
    device: torch.device  # Device that runs the forward.
    # Name -> values of the row's N labels, (N, ...), from earlier forwards; for example "old_logprobs".
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    step_constants: StepConstants = StepConstants()

    def with_scores(self, name: str, values: torch.Tensor) -> PackedRow:
        return dataclasses.replace(self, scores={**self.scores, name: values})

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of the row's sequences, prompts included. A shared token counts once per sequence."""
        return sum(rollout.sequence_tokens for part in self.parts for rollout in part.rollouts)

    @property
    def rollouts(self) -> tuple[RolloutId, ...]:
        return tuple(identity for part in self.parts for identity in part.ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward: one packed row without padding.

    The labels are the N completion tokens that the row predicts. All (N,) tensors are in the order of the labels.

        input_ids       11 12 13 | 21  2 | 22 23 24  2
        position_ids     0  1  2 |  3  4 |  3  4  5  6
        logit_positions       2  3 |  2  5  6  7                indices of the hidden states that predict the labels
        labels          21  2 | 22 23 24  2                predicted tokens
        sequence         0  0 |  1  1  1  1                index into rollouts = (0, 0), (0, 1)
    """

    input_ids: torch.Tensor  # Tokens of the row, (1, T) int64.
    position_ids: torch.Tensor  # Positions of the tokens in their sequences, (1, T) int64.
    layout: SegmentLayout
    logit_positions: torch.Tensor  # Index of the row's hidden state that predicts the label, (N,) int64.
    labels: torch.Tensor  # Predicted token ids, (N,) int64.
    loss_mask: torch.Tensor  # Mask, (N,) float32: 1 for a label that counts in the loss, else 0.
    sequence: torch.Tensor  # Index of the label's completion in this row, (N,) int64, 0 ... num_sequences-1.
    sampler_logprobs: torch.Tensor  # The engine's log-probabilities of the labels, (N,) float32.
    advantages: torch.Tensor  # Advantages of the labels, (N,) float32.
    old_logprobs: torch.Tensor | None  # The old policy's log-probabilities, (N,) float32. None: the step is on-policy.
    rollouts: tuple[RolloutId, ...]  # Identities of the completions in this row, in the row's order.
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)  # Other `PackedRow.scores`, on the device.
    step_constants: StepConstants = StepConstants()
    in_loss: bool = True  # Whether any label counts in the loss.
    completion_lengths: tuple[int, ...] = ()  # Number of tokens of each completion.
    media: Mapping[int, tuple[Any, ...]] | None = None  # Segment index -> its media. None means only text.
    riders: tuple[RowRider, ...] = ()  # Row riders: data of extensions that travels with the row.
    host_positions: torch.Tensor | None = None  # `logit_positions` in host memory, for ranks that share a row.

    def get(self, kind: type[T]) -> T | None:
        return first_rider(self.riders, kind)

    @property
    def num_sequences(self) -> int:
        return len(self.rollouts)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's packed rows on this rank, with the loss denominators over all ranks.

    A step of one group with completions of 2 and 4 tokens, on one rank, has num_loss_tokens = 6, num_sequences = 2."""

    rows: tuple[PackedRow, ...]  # Rows, one per micro-batch, [M]. M is equal on ranks that exchange data in backwards.
    num_loss_tokens: int  # Number of tokens in the loss on all ranks, in groups without a row, too.
    num_sequences: int  # Number of completions on all ranks, in groups without a row, too.
    metrics: dict[str, float]  # Metrics known before training, reduced over ranks.
    groups: tuple[ScoredGroup, ...]  # Groups in the rows, to pack the rows anew if the token budget shrinks.
    version: int = 0  # Number of optimizer steps done before this step.
    counted: bool = True  # Whether sums over ranks include these rows. False: another rank has the same rows.
    trained: int = 0  # Number of rows, from the first, that were trained while the engine still sampled.
    trained_metrics: Any = None  # `Metrics` of the first `trained` rows.


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss and metrics of one micro-batch."""

    loss: torch.Tensor  # Loss summed over the labels, (). The step's gradient is divided by a denominator later.
    sums: dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # Metric name -> (sum, count).
    minima: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

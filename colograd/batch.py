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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


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


STAND_IN = 0  # a token that is no model's image placeholder
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")  # model inputs that mark the tokens of images


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The processed images of a prompt or of a tool's answer.

    All completions share one object. Two objects are equal if their digests and texts are equal, because a run has
    only one processor.

        Images("5f...", engine_ids=(11, 90, 13), pictures=(...), inputs={"pixel_values": ...}, places=(1, 2))
    """

    digest: str  # digest of the pictures' sizes and bytes
    engine_ids: tuple[int, ...]  # the text with one placeholder per picture, as the engine takes it
    pictures: tuple[Any, ...]  # PIL images in RGB, in the order of their placeholders; () on ranks that only train
    inputs: Mapping[str, torch.Tensor]  # tensors that the model's forward takes in addition to ids, on the host
    places: tuple[int, ...]  # indices in the text of the tokens that the pictures' features replace
    placeholder: int = -1  # id of the placeholder token

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Images) and (self.digest, self.engine_ids) == (other.digest, other.engine_ids)

    def __hash__(self) -> int:
        return hash((self.digest, self.engine_ids))


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The model's input: tokens, and the images among them.

    Completions share a prompt in a packed row exactly if their inputs are equal, so all fields must be hashable and
    comparable.

        ModelInput(ids=(11, 12, 13))
    """

    ids: tuple[int, ...]  # [P] tokens; a picture takes one per feature
    images: Images | None = None

    def __len__(self) -> int:
        """Return P, the number of tokens."""
        return len(self.ids)

    def followed_by(self, ids: Sequence[int], images: Images | None = None) -> ModelInput:
        """Return the engine's input for a further turn: this input, then ``ids``.

        A placeholder that the model or a user wrote stands for no picture, but the engine would take it for the next
        one's. So the engine gets another token in its place, and puts the placeholder back (see `engine.images`).

        Args:
            ids: tokens behind this input.
            images: the images among ``ids``, with places in ``ids``.
        """
        before, last = self.images, images or self.images
        if last is None:
            return ModelInput((*self.ids, *ids))

        def plain(ids: Sequence[int]) -> Iterator[int]:
            return (STAND_IN if token == last.placeholder else token for token in ids)

        both = [of for of in (before, images) if of is not None]
        joined = Images(
            digest="+".join(of.digest for of in both),
            engine_ids=(
                *(plain(self.ids) if before is None else before.engine_ids),
                *(plain(ids) if images is None else images.engine_ids),
            ),
            pictures=tuple(picture for of in both for picture in of.pictures),
            inputs={},  # the engine makes its own
            places=(*(before.places if before else ()), *(len(self) + at for at in (images.places if images else ()))),
            placeholder=last.placeholder,
        )
        return ModelInput((*self.ids, *ids), joined)

    @property
    def key(self) -> str:
        """A digest of tokens and images: the same in every process, and in each epoch of a run."""
        seen = b"" if self.images is None else self.images.digest.encode()
        return hashlib.blake2b(array("q", self.ids).tobytes() + seen, digest_size=8).hexdigest()


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
        if not isinstance(self.input, ModelInput):  # plain ids, as users write them
            object.__setattr__(self, "input", ModelInput(tuple(self.input)))

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
UNTAUGHT = float("inf")  # value of a teacher's log-probability if the prompt names no teacher
UNKNOWN = -1  # value of an expert's index if the engine didn't record it


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The experts that the engine's routers chose for a rollout's tokens: K in each of L layers with experts.

    The last token has no known experts, because the engine never read it. The tensors are int8 (int16 above 128
    experts), so a token takes L * K bytes. All completions of a prompt share the prompt's tensor.
    """

    prompt: torch.Tensor  # [P, L, K], one tensor for all rollouts of a group
    completion: torch.Tensor  # [C, L, K]


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The tokens that top-k, top-p and min-p had left when each of N tokens was sampled, in one flat tensor.

    In the second completion, 23 was sampled from the whole vocabulary, so its count is 0:

        completion_ids   22          23  24        2
        ids              22 27 29        24 12     2
        counts           3           0   2         1
    """

    ids: torch.Tensor  # [sum counts] int32 token ids
    counts: torch.Tensor  # [N] int32, number of ids per token; 0: the whole vocabulary

    @classmethod
    def joined(cls, parts: Sequence[tuple[KeptTokens | None, int]]) -> KeptTokens | None:
        """Concatenate the kept tokens of several sequences, each with its length; None if nothing was truncated."""
        if all(kept is None for kept, _ in parts):
            return None
        none = torch.empty(0, dtype=torch.int32)
        counts = [none.new_zeros(length) if kept is None else kept.counts for kept, length in parts]
        return cls(torch.cat([none if kept is None else kept.ids for kept, _ in parts]), torch.cat(counts))

    def of(self, places: torch.Tensor) -> KeptTokens:
        """Select the kept tokens at some of the N places."""
        starts, counts = self.counts.cumsum(0) - self.counts, self.counts[places]
        shifts = starts[places] - (counts.cumsum(0) - counts)
        index = torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts.long())
        return KeptTokens(self.ids[index], counts)


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
class VersionSpan:
    """Consecutive tokens that the same weights sampled, in a rollout that rounds carried over (`carry_over`).

    The round at step 7 sampled two tokens of the second completion, and the round at step 8 the others:

        completion_ids   22 23 | 24  2
        spans            VersionSpan(2, version=7), VersionSpan(2, version=8)
    """

    length: int  # tokens
    version: int  # optimizer step of the weights that sampled them


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
    policy_version: int  # optimizer step of its weights; with `spans`: of the weights in the round that trains it
    messages: tuple[dict[str, Any], ...] = ()  # a conversation's messages behind the prompt; (): the completion is text
    columns: Mapping[str, Any] = field(default_factory=dict)  # this completion's keywords for reward functions
    experts: RoutedExperts | None = None  # the engine's experts, with `router_replay`
    kept: KeptTokens | None = None  # tokens that truncated sampling had left; None: not truncated or not recorded
    images: tuple[Images, ...] = ()  # images of tools' answers, with places in the completion
    branches: tuple[Branch, ...] = ()  # branches of a tree; (): each token sees the prompt and all tokens before it
    spans: tuple[VersionSpan, ...] = ()  # weights that sampled its tokens; (): `policy_version` sampled all

    def __post_init__(self) -> None:
        _Asked.__post_init__(self)
        if not isinstance(self.completion_ids, array):
            object.__setattr__(self, "completion_ids", array("i", self.completion_ids))

    @property
    def tree(self) -> tuple[Branch, ...]:
        """The branches. A rollout that is no tree has one, the whole completion."""
        return self.branches or (Branch(len(self.completion_ids), prompt=len(self.input)),)

    @property
    def versions(self) -> torch.Tensor:
        """[C] int64: optimizer step of the weights that sampled each token."""
        if not self.spans:
            return torch.full((len(self.completion_ids),), self.policy_version)
        return torch.cat([torch.full((span.length,), span.version) for span in self.spans])

    @property
    def seen(self) -> tuple[int, ...]:
        """Number of tokens before each branch of the `tree` that the branch's tokens see."""
        found: list[int] = []
        for branch in self.tree:
            before = branch.prompt if branch.after is None else found[branch.after] + self.tree[branch.after].length
            found.append(before)
        return tuple(found)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of all sequences of the tree: each leaf with the tokens that it sees."""
        within = {branch.after for branch in self.tree}
        ends = (i for i in range(len(self.tree)) if i not in within)
        return sum(self.seen[i] + self.tree[i].length for i in ends)


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

    One reward function, and one advantage per completion (or one per token, here 2 + 4):

        rewards       [[1.0], [0.0]]
        advantages    [0.71, -0.71]
    """

    group: Group
    rewards: torch.Tensor  # [G, R] float32; NaN: that function abstained
    advantages: torch.Tensor  # [G] float32, one per completion, or [sum C] one per completion token
    logged: Logged = field(default_factory=lambda: Logged({}, {}))

    def for_training(self) -> ScoredGroup:
        """Return a copy to send to another rank, without the fields that only rewards and logs read."""
        seen: dict[ModelInput, ModelInput] = {}  # a prompt's completions share one object, on the receiver too
        rollouts = tuple(
            dataclasses.replace(
                rollout,
                messages=(),
                columns={},
                input=seen.setdefault(rollout.input, _bare(rollout.input)),
                images=tuple(map(_without_pictures, rollout.images)),
            )
            for rollout in self.group.rollouts
        )
        kept = {name: value for name, value in self.group.example.items() if name == TEACHER}
        group = dataclasses.replace(self.group, example=kept, rollouts=rollouts)
        # Clones, because a view would be sent with its whole storage.
        return ScoredGroup(group, self.rewards.clone(), self.advantages.clone())


def _bare(asked: ModelInput) -> ModelInput:
    """Return the input without its pictures."""
    return asked if asked.images is None else dataclasses.replace(asked, images=_without_pictures(asked.images))


def _without_pictures(images: Images) -> Images:
    """Return the images without PIL pictures, but with the forward's inputs."""
    return dataclasses.replace(images, pictures=())


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
    teacher: str = ""  # name of the teacher that scores these rollouts, in a run with several

    @property
    def num_tokens(self) -> int:
        return len(self.rollouts[0].input) + sum(len(r.completion_ids) for r in self.rollouts)


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
    teacher_logprobs: torch.Tensor | None = None  # (N,) float32 on the device
    teacher_states: torch.Tensor | None = None  # (N, hidden), with a GPU in host memory; see MicroBatch
    teacher_top: torch.Tensor | None = None  # (N, 2, K), with a GPU in host memory; see MicroBatch
    step_constants: StepConstants = StepConstants()

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

    def experts(self) -> torch.Tensor | None:
        """Return the experts of the row's tokens (T, L, K), `UNKNOWN` if not recorded; None if none are recorded."""
        told = [r.experts for part in self.parts for r in part.rollouts if r.experts is not None]
        if not told:
            return None
        pieces = []
        for part in self.parts:
            first = part.rollouts[0]
            pieces.append((len(first.input), first.experts and first.experts.prompt))
            pieces += [(len(r.completion_ids), r.experts and r.experts.completion) for r in part.rollouts]
        shape = told[0].prompt.shape[1:]
        return torch.cat([told[0].prompt.new_full((n, *shape), UNKNOWN) if of is None else of for n, of in pieces])


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
    teacher_logprobs: torch.Tensor | None = None  # (N,) float32, with a teacher and `distillation_kl: sampled`
    teacher_states: torch.Tensor | None = None  # (N, hidden of the teacher), input of its head; with `exact`
    # (N, 2, K) float32, with `top_k`: ids (exact in float32) and log-probabilities of the teacher's K likeliest tokens.
    teacher_top: torch.Tensor | None = None
    step_constants: StepConstants = StepConstants()
    in_loss: bool = True  # whether any token counts in the loss, known without a device sync
    completion_lengths: tuple[int, ...] = ()  # tokens of each completion
    experts: torch.Tensor | None = None  # (T, L, K), chosen by the engine; see `PackedRow.experts`
    kept: KeptTokens | None = None  # kept tokens of each label, on the host; every model's softmax is over them
    images: Mapping[int, tuple[Images, ...]] | None = None  # segment -> images, with places in it; None: no images
    ages: torch.Tensor | None = None  # (N,) float32, optimizer steps from a token's weights to the round's; None: 0
    host_positions: torch.Tensor | None = None  # (N,) logit_positions on the host, for ranks that share the row

    @property
    def num_sequences(self) -> int:
        """Number of completions in this row."""
        return len(self.rollouts)

    @property
    def predictors(self) -> torch.Tensor:
        """The former name of `logit_positions`, for losses that use it."""
        return self.logit_positions


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

    @property
    def on_policy(self) -> bool:
        """Whether the weights that the step trains sampled all of its rollouts."""
        return all(
            rollout.policy_version == self.version for scored in self.groups for rollout in scored.group.rollouts
        )


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss and metrics of one micro-batch."""

    loss: torch.Tensor  # () the unnormalised SUM; the step's denominator is applied once, by the trainer
    sums: dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # metric -> (sum, count)
    minima: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

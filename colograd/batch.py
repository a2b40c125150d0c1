"""The types that data has on its way from a prompt to an optimizer step. Imports torch only.

    Prompt -> Rollout -> Group -> ScoredGroup -> SampledStep -> StepBatch[PackedRow ...] -> MicroBatch -> LossOutput

One frozen type per stage; a field is there from the start or belongs to a later type. Shape letters: P prompt tokens, C
completion tokens, G completions of a group, R reward functions, T tokens of a packed row, N predicted completion tokens
of a micro-batch, S segments of a packed row, M micro-batches of a step.

Each type shows the same group: the prompt "2 + 2 =" is the tokens 11 12 13, and its two completions are "4" (21, then
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


STAND_IN = 0  # a token that is no placeholder, of any model
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")  # inputs that say of each token whether it is an image's


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of a prompt, or of a tool's answer, as the processor made them, once: completions share this object.

    Equal where the pictures are, by their digest; processors are a run's.

        Images("5f...", engine_ids=(11, 90, 13), pictures=(...), inputs={"pixel_values": ...}, places=(1, 2))
    """

    digest: str  # of the pictures' sizes and bytes
    engine_ids: tuple[int, ...]  # the text with one placeholder per picture, which the engine fills itself
    pictures: tuple[Any, ...]  # PIL images in RGB, in the order of their placeholders; dropped where only the trainer
    inputs: Mapping[str, torch.Tensor]  # reads them. What the model's forward takes beside ids, on the host
    places: tuple[int, ...]  # in the text, of the tokens whose embeddings the pictures' features replace
    placeholder: int = -1  # the token of that name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Images) and (self.digest, self.engine_ids) == (other.digest, other.engine_ids)

    def __hash__(self) -> int:
        return hash((self.digest, self.engine_ids))


@dataclass(frozen=True, slots=True)
class ModelInput:
    """All that the model reads before it writes: tokens, and the images among them.

    Completions share a prompt in a packed row exactly where their inputs are equal, so all fields must be hashable and
    comparable.

        ModelInput(ids=(11, 12, 13))
    """

    ids: tuple[int, ...]  # [P], with as many tokens for a picture as the model has features of it
    images: Images | None = None

    def __len__(self) -> int:
        """P: the tokens."""
        return len(self.ids)

    def followed_by(self, ids: Sequence[int], images: Images | None = None) -> ModelInput:
        """What the engine reads for a further turn: all of this, and what was written behind it.

        A placeholder that somebody wrote is no picture's: the engine, which would take it for the next one's, gets
        another token in its place, and puts it back (see `engine.images`).

        Args:
            images: among ``ids``, with places in them.
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
        """A digest of all that is read: the same in every process, and in each epoch of a run."""
        seen = b"" if self.images is None else self.images.digest.encode()
        return hashlib.blake2b(array("q", self.ids).tobytes() + seen, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class RolloutId:
    """Which completion of the run it is. Two completions of equal tokens have two identities."""

    position: int  # of its prompt in the stream of prompts
    index: int  # in its group


class _Asked:
    """A prompt, or what answers one: it has an ``input``."""

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
    """A prompt in the queue: the dataset's row, what the model reads of it, and its place in the stream of prompts.

    ``position`` counts prompts over the whole run and all ranks, so a request's seed depends on neither the number of
    ranks nor the batch it falls into.

        Prompt({"prompt": "2 + 2 =", "answer": "4"}, ModelInput((11, 12, 13)), position=0)
    """

    example: dict[str, Any]
    input: ModelInput  # or [P] ids, which become one
    position: int


TEACHER = "teacher"  # the dataset's column that names a prompt's teacher, where there are several
UNTAUGHT = float("inf")  # in the place of a teacher's log-probability: the prompt names none
UNKNOWN = -1  # in the place of an expert: the engine didn't tell which it was


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Which experts the engine's routers chose for a rollout's tokens: K in each of L layers that have some. The last
    token's aren't known: it was never read.

    In int8 (int16 of more than 128 experts), so L * K bytes per token, and once for all that answer a prompt.
    """

    prompt: torch.Tensor  # [P, L, K], of a group's rollouts one tensor
    completion: torch.Tensor  # [C, L, K]


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """Which tokens top-k, top-p and min-p had left when each of N tokens was drawn: the places' ids one after another.

    Of the second completion, whose 23 was drawn from the whole vocabulary, as a 0 says:

        completion_ids   22          23  24        2
        ids              22 27 29        24 12     2
        counts           3           0   2         1
    """

    ids: torch.Tensor  # [sum counts] int32
    counts: torch.Tensor  # [N] int32; 0: all

    @classmethod
    def joined(cls, parts: Sequence[tuple[KeptTokens | None, int]]) -> KeptTokens | None:
        """Those of several sequences one after another, each with its length; None: all were drawn from the whole."""
        if all(kept is None for kept, _ in parts):
            return None
        none = torch.empty(0, dtype=torch.int32)
        counts = [none.new_zeros(length) if kept is None else kept.counts for kept, length in parts]
        return cls(torch.cat([none if kept is None else kept.ids for kept, _ in parts]), torch.cat(counts))

    def of(self, places: torch.Tensor) -> KeptTokens:
        """Those of some of the N tokens."""
        starts, counts = self.counts.cumsum(0) - self.counts, self.counts[places]
        shifts = starts[places] - (counts.cumsum(0) - counts)
        index = torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts.long())
        return KeptTokens(self.ids[index], counts)


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive tokens of a rollout that is a tree: of an agent's session, whose contexts share beginnings.

    A rollout's branches lie one after the other in its completion, each behind the one that it goes on from. Here the
    agent called the model behind the whole prompt 11 12 13 (branch 0), went on (1), and then again from the prompt's
    first two tokens, with a shorter context (2):

        completion_ids   21 22 | 31 32 | 41 42
        branches         Branch(2, prompt=3), Branch(2, after=0), Branch(2, prompt=2)
    """

    length: int  # tokens
    after: int | None = None  # the branch at whose end it goes on; None: within the prompt, or at its end
    prompt: int = 0  # of a branch after none: the tokens of the prompt that it sees


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Consecutive tokens of a rollout that the same weights sampled, where rounds carried it over (`carry_over`).

    The second completion, of which the round at step 7 sampled two tokens, and the one at step 8 the others:

        completion_ids   22 23 | 24  2
        spans            VersionSpan(2, version=7), VersionSpan(2, version=8)
    """

    length: int  # tokens
    version: int  # the optimizer step whose weights sampled them


@dataclass(frozen=True, slots=True)
class Rollout(_Asked):
    """One completion, with what the sampler knew of it.

    The second completion; each log-probability is that of the token given all before it:

        input.ids         11 12 13
        completion_ids              22   23   24    2
        sampler_logprobs          -1.2 -0.3 -0.9 -0.1
    """

    input: ModelInput  # or [P] ids, which become one
    completion_ids: array[int]  # [C] "i", as sampled, never re-tokenised; any sequence of ids becomes one
    sampler_logprobs: torch.Tensor  # [C] float32, nats, of the sampled token at the sampling temperature
    sampled: torch.Tensor  # [C] bool; False: a tool wrote the token, the loss ignores it
    finish_reason: FinishReason
    policy_version: int  # the optimizer step whose weights sampled it; with `spans`: those of the round that trains it
    messages: tuple[dict[str, Any], ...] = ()  # of a conversation: all that followed the prompt; else the text says it
    columns: Mapping[str, Any] = field(default_factory=dict)  # its own keywords for reward functions
    experts: RoutedExperts | None = None  # with `router_replay`
    kept: KeptTokens | None = None  # of its tokens, where the sampler's distribution was truncated and that is recorded
    images: tuple[Images, ...] = ()  # of tools' answers, with places in the completion
    branches: tuple[Branch, ...] = ()  # of a tree; (): each token sees the prompt and all before it
    spans: tuple[VersionSpan, ...] = ()  # which weights sampled its tokens; (): those of `policy_version` all of them

    def __post_init__(self) -> None:
        _Asked.__post_init__(self)
        if not isinstance(self.completion_ids, array):
            object.__setattr__(self, "completion_ids", array("i", self.completion_ids))

    @property
    def tree(self) -> tuple[Branch, ...]:
        """The branches; of a rollout that is none, the one that is all of it."""
        return self.branches or (Branch(len(self.completion_ids), prompt=len(self.input)),)

    @property
    def versions(self) -> torch.Tensor:
        """[C] int64: the optimizer step whose weights sampled each token."""
        if not self.spans:
            return torch.full((len(self.completion_ids),), self.policy_version)
        return torch.cat([torch.full((span.length,), span.version) for span in self.spans])

    @property
    def seen(self) -> tuple[int, ...]:
        """The tokens before each branch of the `tree`, which all of its own see."""
        found: list[int] = []
        for branch in self.tree:
            before = branch.prompt if branch.after is None else found[branch.after] + self.tree[branch.after].length
            found.append(before)
        return tuple(found)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of its sequences, one per branch that no other goes on from, each with all that it sees."""
        within = {branch.after for branch in self.tree}
        ends = (i for i in range(len(self.tree)) if i not in within)
        return sum(self.seen[i] + self.tree[i].length for i in ends)


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt. All are sampled and scored on one rank; another may train them.

    The first prompt's two completions:

        rollouts       21 2 | 22 23 24 2
        rollout_ids    (0, 0), (0, 1)
    """

    example: dict[str, Any]
    rollouts: tuple[Rollout, ...]  # [G]
    position: int  # of the prompt in the stream

    @property
    def rollout_ids(self) -> tuple[RolloutId, ...]:
        """[G]"""
        return tuple(RolloutId(self.position, index) for index in range(len(self.rollouts)))


@dataclass(frozen=True, slots=True)
class Logged:
    """What reward functions logged of a group beside its rewards."""

    columns: dict[str, tuple[Any, ...]]  # [G] values of each further column of the completions table
    metrics: dict[str, tuple[float, int]]  # sum and number of the values of each


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards and advantages.

    One reward function, and one advantage per completion (or one per token, 2 + 4 of them):

        rewards       [[1.0], [0.0]]
        advantages    [0.71, -0.71]
    """

    group: Group
    rewards: torch.Tensor  # [G, R] float32; NaN: that function abstained
    advantages: torch.Tensor  # [G] float32, one per completion, or [sum C] one per completion token
    logged: Logged = field(default_factory=lambda: Logged({}, {}))

    def for_training(self) -> ScoredGroup:
        """The group without what only rewards and logs read, to be sent to another rank."""
        seen: dict[ModelInput, ModelInput] = {}  # one object for the completions of one prompt, also where they arrive
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
        # Clones, because a view of a larger tensor is sent with all of it.
        return ScoredGroup(group, self.rewards.clone(), self.advantages.clone())


def _bare(asked: ModelInput) -> ModelInput:
    """An input without the pictures."""
    return asked if asked.images is None else dataclasses.replace(asked, images=_without_pictures(asked.images))


def _without_pictures(images: Images) -> Images:
    """Of which the pixels are left."""
    return dataclasses.replace(images, pictures=())


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The groups of one optimizer step on this rank. The two differ with dynamic sampling only."""

    kept: tuple[ScoredGroup, ...]  # what the step is about: its denominators count them
    sampled: tuple[ScoredGroup, ...]  # this step's share of all that was sampled: metrics and logs count them


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Which tokens of a packed row see which: each segment sees itself (causally) and the earlier segments it names.

    Both completions see the prompt:

        row        11 12 13 | 21  2 | 22 23 24  2
        lengths    (3, 2, 4)
        attends_to       ((), (0,), (0,))
    """

    lengths: tuple[int, ...]  # [S] tokens, in the order of the row
    attends_to: tuple[tuple[int, ...], ...]  # [S] indices of earlier segments, in the order of their keys

    @property
    def starts(self) -> tuple[int, ...]:
        """[S] index in the row of each segment's first token."""
        return tuple(itertools.accumulate(self.lengths, initial=0))[:-1]

    @property
    def num_tokens(self) -> int:
        """T: the length of the row."""
        return sum(self.lengths)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest segment with those it attends to."""
        seen = zip(self.lengths, self.attends_to, strict=True)
        return max(own + sum(self.lengths[s] for s in earlier) for own, earlier in seen)

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.attends_to), (len(self.lengths), len(self.attends_to))
        for index, seen in enumerate(self.attends_to):
            assert all(0 <= s < index for s in seen), f"segment {index} sees {seen}: only earlier segments can be seen"


@dataclass(frozen=True, slots=True)
class StepConstants:
    """What the terms of the entropy and of routers must know of the whole step (see `losses.entropy`)."""

    coefficient: float = 0.0  # of the bonus, in this step
    denominator: float = 1.0  # the step's, by which the trainer will divide the sum
    threshold: float | None = None  # of the top-entropy quantile, nats; None: the micro-batch is the whole step
    tokens: float | None = None  # that the bonus is a mean over; None: likewise
    sequence_tokens: float | None = None  # of all sequences, each with its prompt; None: likewise


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Some completions of one group with their prompt: what is packed as a unit."""

    ids: tuple[RolloutId, ...]
    rollouts: tuple[Rollout, ...]
    advantages: tuple[torch.Tensor, ...]  # per rollout: () or [C]
    teacher: str = ""  # by which these are scored, where there are several

    @property
    def num_tokens(self) -> int:
        return len(self.rollouts[0].input) + sum(len(r.completion_ids) for r in self.rollouts)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """What goes into one micro-batch. It copies no token: `packing.collate` does when a forward needs the row, so a
    step's tokens lie in memory once, as they were sampled, and none wait on the device."""

    parts: tuple[PackedGroup, ...]
    mask_truncated: bool
    device: torch.device  # where the forward will be
    old_logprobs: torch.Tensor | None = None  # (N,) float32 on the device; see MicroBatch
    ref_logprobs: torch.Tensor | None = None  # likewise
    teacher_logprobs: torch.Tensor | None = None  # likewise
    teacher_states: torch.Tensor | None = None  # (N, hidden) in host memory beside a GPU; see MicroBatch
    teacher_top: torch.Tensor | None = None  # (N, 2, K), likewise
    step_constants: StepConstants = StepConstants()

    @property
    def num_tokens(self) -> int:
        """T: the length of the row."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of its completions, each with its prompt."""
        return sum(rollout.sequence_tokens for part in self.parts for rollout in part.rollouts)

    @property
    def rollouts(self) -> tuple[RolloutId, ...]:
        """The completions in this row, in its order."""
        return tuple(identity for part in self.parts for identity in part.ids)

    def experts(self) -> torch.Tensor | None:
        """(T, L, K) of the row's tokens, `UNKNOWN` where the engine told none; None: it told none of all."""
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
    """What one forward and backward sees: one packed row without padding.

    The [N] tensors are aligned with each other: one entry per completion token that the row predicts.

        input_ids       11 12 13 | 21  2 | 22 23 24  2
        position_ids     0  1  2 |  3  4 |  3  4  5  6
        logit_positions       2  3 |  2  5  6  7                the places whose hidden states predict ...
        labels          21  2 | 22 23 24  2                ... these tokens
        sequence         0  0 |  1  1  1  1                of the completions rollouts = (0, 0), (0, 1)
    """

    input_ids: torch.Tensor  # (1, T) int64
    position_ids: torch.Tensor  # (1, T) int64
    layout: SegmentLayout
    logit_positions: torch.Tensor  # (N,) int64: the place in the row whose hidden state predicts the label
    labels: torch.Tensor  # (N,) int64
    loss_mask: torch.Tensor  # (N,) float32, 1: the token counts in the loss
    sequence: torch.Tensor  # (N,) int64: which completion of this row the token belongs to, 0 ... num_sequences-1
    sampler_logprobs: torch.Tensor  # (N,) float32
    advantages: torch.Tensor  # (N,) float32
    old_logprobs: torch.Tensor | None  # (N,) float32; None exactly when the rollouts are on-policy
    ref_logprobs: torch.Tensor | None  # (N,) float32; None exactly when beta == 0
    rollouts: tuple[RolloutId, ...]  # the completions in this row, in its order
    teacher_logprobs: torch.Tensor | None = None  # (N,) float32, with a teacher and `distillation_kl: sampled`
    teacher_states: torch.Tensor | None = None  # (N, hidden of the teacher), what its head is given; with `exact`
    # (N, 2, K) float32, its K most probable tokens' ids, which float32 holds exactly, and log-probabilities; `top_k`.
    teacher_top: torch.Tensor | None = None
    step_constants: StepConstants = StepConstants()
    in_loss: bool = True  # whether any token counts in the loss: known without asking the device
    completion_lengths: tuple[int, ...] = ()  # tokens of each completion
    experts: torch.Tensor | None = None  # (T, L, K) that the engine chose, see `PackedRow.experts`
    kept: KeptTokens | None = None  # of the labels, in host memory; every model's distribution is that over them
    images: Mapping[int, tuple[Images, ...]] | None = None  # by their segment, with places in it; None: there are none
    ages: torch.Tensor | None = None  # (N,) float32, optimizer steps from a token's weights to the round's; None: 0
    host_positions: torch.Tensor | None = None  # (N,) logit_positions in host memory, for ranks that share the row

    @property
    def num_sequences(self) -> int:
        """Completions in this row."""
        return len(self.rollouts)

    @property
    def predictors(self) -> torch.Tensor:
        """The former name of `logit_positions`, for losses written against it."""
        return self.logit_positions


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's work on this rank, with the step's global denominators.

    With the example's group alone, on one rank: num_loss_tokens = 6, num_sequences = 2.
    """

    rows: tuple[PackedRow, ...]  # [M] one per micro-batch, M equal on all ranks where these must step together
    num_loss_tokens: int  # tokens in the loss, over all ranks and groups, packed or not
    num_sequences: int  # completions, likewise
    metrics: dict[str, float]  # reduced over ranks: what was known before training
    groups: tuple[ScoredGroup, ...]  # what the rows hold: they can be packed again under another budget
    version: int = 0  # the optimizer step whose weights it trains
    counted: bool = True  # False: another rank has the same rows, and sums over ranks count them there
    trained: int = 0  # of the rows: the first ones, whose gradients were made before all was sampled

    @property
    def on_policy(self) -> bool:
        """Whether the weights that it trains sampled all of its rollouts."""
        return all(
            rollout.policy_version == self.version for scored in self.groups for rollout in scored.group.rollouts
        )


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss says of one micro-batch."""

    loss: torch.Tensor  # () the unnormalised SUM; the step's denominator is applied once, by the trainer
    sums: dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # metric -> (sum, count)
    minima: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

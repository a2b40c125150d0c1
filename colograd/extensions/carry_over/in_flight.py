"""Groups in flight: groups that a round of sampling with `carry_over` leaves untrained. The next round continues them.

    round at step 7    draws 10 prompts, trains the 8 groups that finish first, carries 2 groups over
    round at step 8    continues these 2 groups, draws 8 new prompts, ...

Each group is trained once, as a whole. Each token is sampled once. Groups in flight are saved in each checkpoint, and
after each round in the rollout log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ...batch import FinishReason, Group, Logged, ModelInput, PackedRow, Prompt, Rollout
from ...engine.protocol import Sampled
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider, joined_riders
from ...rollout.group_records import NONSENSE, JournalError, RewardedGroup, group_bytes, group_of
from ...rollout.record_file import Record, RecordFile, read_records

FILE = "in_flight_{rank}.records"  # Name of a rank's file in a checkpoint.
HEAD = 0  # Position number of a file's first record, which has no group but the number of groups.


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Consecutive tokens of a completion that were sampled with the same weights."""

    length: int  # Number of tokens.
    version: int  # Optimizer step of the weights that sampled the tokens.


@dataclass(frozen=True, slots=True)
class Versions(Rider):
    """Rider (per-token data of a rollout) with the versions of the weights that sampled a completion's tokens. All
    tokens of a completion without this rider have the version `Rollout.policy_version`.

    Example: the round at step 7 sampled two tokens of a completion, and the round at step 8 two further tokens:

        completion_ids   22 23 | 24  2
        spans            VersionSpan(2, version=7), VersionSpan(2, version=8)
    """

    spans: tuple[VersionSpan, ...]

    KEY = "spans"

    def statistics(self, rollout: Rollout) -> tuple[dict[str, float], dict[str, float]]:
        ages = rollout.policy_version - versions_of(rollout)
        sums = {"carry_over/old_tokens": float((ages > 0).sum()), "carry_over/ages": float(ages.sum())}
        return sums, {"carry_over/max_age": float(ages.max())}

    @classmethod
    def of_row(cls, row: PackedRow) -> TokenAges:
        rollouts = [rollout for part in row.parts for rollout in part.rollouts]
        ages = torch.cat([rollout.policy_version - versions_of(rollout) for rollout in rollouts]).float()
        return TokenAges(to_device_async(ages, row.device))

    def to_json(self) -> Any:
        return [[span.length, span.version] for span in self.spans]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Any]], rollout: Rollout) -> Self:
        spans = tuple(VersionSpan(int(length), int(version)) for length, version in value)
        assert sum(span.length for span in spans) == len(rollout.completion_ids), "versions don't fit"
        return cls(spans)


@dataclass(frozen=True, slots=True, eq=False)
class TokenAges(RowRider):
    """Ages of a packed row's labels (target tokens): the step of a label's round minus the step of its sampler's
    weights."""

    ages: torch.Tensor  # Age of each label in optimizer steps, (N,) float32.

    def metrics(self, difference: torch.Tensor, scored: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        old = scored * (self.ages > 0)
        return {"carry_over/old_logp_difference": ((difference * old).sum(), old.sum())}


def versions_of(rollout: Rollout) -> torch.Tensor:
    """Return for each token of a completion the optimizer step of the weights that sampled it, [C] int64."""
    versions = rollout.get(Versions)
    if versions is None:
        return torch.full((len(rollout.completion_ids),), rollout.policy_version)
    return torch.cat([torch.full((span.length,), span.version) for span in versions.spans])


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The tokens of one completion that are sampled so far. The completion may be unfinished or whole."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # Log-probability of each token.
    spans: tuple[VersionSpan, ...] = ()  # Versions of the weights that sampled the tokens.
    riders: tuple[Rider, ...] = ()
    finish_reason: FinishReason | None = None  # None means that the completion is unfinished.

    def extended(self, part: Sampled, version: int) -> PartialCompletion:
        ended = None if part.finish_reason is FinishReason.ABORT else part.finish_reason
        spans = (*self.spans, VersionSpan(len(part.ids), version)) if part.ids else self.spans
        riders = joined_riders([(self.riders, len(self.ids)), (part.riders, len(part.ids))], 0)
        return PartialCompletion(self.ids + part.ids, self.logprobs + part.logprobs, spans, riders, ended)

    @classmethod
    def of_record(cls, rollout: Rollout) -> Self:
        """Rebuild a partial completion from a rollout that `recorded` returned."""
        versions, riders = rollout.get(Versions), tuple(r for r in rollout.riders if not isinstance(r, Versions))
        logprobs = array("f", rollout.sampler_logprobs.numpy().tobytes())
        ended = None if rollout.finish_reason is FinishReason.ABORT else rollout.finish_reason
        return cls(rollout.completion_ids, logprobs, () if versions is None else versions.spans, riders, ended)

    def recorded(self, prompt: ModelInput, since: int) -> Rollout:
        """Return the tokens so far as a `Rollout`, because the rollout log records completions in this form."""
        logprobs, sampled = torch.tensor(self.logprobs), torch.ones(len(self.ids), dtype=torch.bool)
        riders = (*self.riders, *([Versions(self.spans)] if self.spans else []))
        reason = self.finish_reason or FinishReason.ABORT
        return Rollout(prompt, self.ids, logprobs, sampled, reason, since, riders=riders)

    def rollout(self, prompt: ModelInput, version: int) -> Rollout:
        """Return a whole completion as a rollout of the round at optimizer step ``version``."""
        assert self.finish_reason is not None
        whole = Sampled(self.ids, self.logprobs, self.finish_reason, self.riders).rollout(prompt, version)
        is_new = all(span.version == version for span in self.spans)
        return whole if is_new else whole.carrying(Versions(self.spans))


@dataclass(frozen=True, slots=True)
class GroupInFlight:
    """A group that isn't trained yet: completions are unfinished, or the group finished when its round was full."""

    prompt: Prompt
    completions: tuple[PartialCompletion, ...]  # The G completions of the prompt.
    since: int  # Optimizer step of the round that began the group.

    @property
    def is_whole(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def group(self, version: int) -> Group:
        rollouts = tuple(completion.rollout(self.prompt.input, version) for completion in self.completions)
        return Group(self.prompt.example, rollouts, self.prompt.position)


class RoundEnd(NamedTuple):
    done: tuple[int, ...]  # Positions of the groups that the round trains.
    carried: tuple[GroupInFlight, ...]  # Groups that the next round continues, the oldest first.


@dataclass(slots=True)
class InFlight:
    """Groups in flight that a rank carries from one round of sampling to the next."""

    takes: int  # Number of groups that a round trains.
    size: int  # Number of groups that are sampled at the same time.
    max_age: int  # Maximum number of optimizer steps between the beginning of a group and its last round.
    completions: int  # Number of completions in a group.
    longest: int  # Maximum number of tokens in a completion.
    groups: tuple[GroupInFlight, ...] = ()  # Groups in flight, the oldest first.

    def begin(self, prompts: Sequence[Prompt], version: int) -> list[GroupInFlight]:
        """Return a group for each prompt of the round at step ``version``: a carried group, or a new one without
        tokens."""
        begun = {
            group.prompt.position: group
            for group in self.groups
            if any(completion.ids or completion.finish_reason for completion in group.completions)
        }
        new = (PartialCompletion(),) * self.completions
        return [begun.get(prompt.position) or GroupInFlight(prompt, new, since=version) for prompt in prompts]

    def due(self, groups: Sequence[GroupInFlight], version: int) -> set[int]:
        """Return the positions of groups that the round at step ``version`` must finish, because of their age."""
        old = [group.prompt.position for group in groups if version - group.since >= self.max_age]
        return set(old[: self.takes])

    def save(self, folder: str | Path, rank: int, ranks: int) -> None:
        write_round_end(Path(folder, FILE.format(rank=rank)), RoundEnd((), self.groups), ranks)

    def load(self, folder: str | Path, rank: int, ranks: int, prompt_at: Callable[[int], Prompt]) -> str:
        """Load this rank's groups in flight from a checkpoint, or a part of all ranks' groups if the number of ranks
        has changed. Return a warning if groups are missing, or else an empty text."""
        own = read_round_end(Path(folder, FILE.format(rank=rank)), prompt_at, ranks)
        if own is None:
            files = [*Path(folder).glob(FILE.format(rank="*"))]
            ends = [read_round_end(path, prompt_at, ranks=len(files)) for path in files]
            if None in ends:
                self.groups = ()
                return f"carry_over: {folder} lacks the groups in flight of some of its ranks: they aren't trained."
            carried = [group for end in ends if end is not None for group in end.carried]
            own = RoundEnd((), tuple(sorted(carried, key=lambda each: (each.since, each.prompt.position))[rank::ranks]))
        groups = []
        for group in own.carried:
            if len(group.completions) != self.completions:
                raise JournalError(
                    f"{folder} has unfinished groups of {len(group.completions)} completions, but num_generations is "
                    f"{self.completions}: set num_generations back, or drop these groups by ignore_data_skip: true."
                )
            parts = [*group.completions]
            for index, each in enumerate(parts):  # A completion with this run's maximum number of tokens is finished.
                if each.finish_reason is None and len(each.ids) >= self.longest:
                    parts[index] = dataclasses.replace(each, finish_reason=FinishReason.LENGTH)
            groups.append(dataclasses.replace(group, completions=tuple(parts)))
        self.groups = tuple(groups)
        return ""


def write_round_end(path: Path, end: RoundEnd, ranks: int) -> None:
    """Write a round's trained positions and carried groups to a file, in place of an older file. ``ranks``: number of
    ranks that divide the round's prompts."""
    path.unlink(missing_ok=True)
    head = {"done": end.done, "ranks": ranks, "groups": len(end.carried)}
    with contextlib.closing(RecordFile(path)) as file:
        file.append(Record(HEAD, json.dumps(head).encode()))
        for group in end.carried:
            prompt = group.prompt
            rollouts = tuple(part.recorded(prompt.input, group.since) for part in group.completions)
            whole = Group(prompt.example, rollouts, prompt.position)
            recorded = RewardedGroup(whole, torch.zeros(len(rollouts), 1), Logged({}, {}))
            file.append(Record(prompt.position, group_bytes(recorded)))
        file.flush()


def read_round_end(path: Path, prompt_at: Callable[[int], Prompt | None], ranks: int) -> RoundEnd | None:
    """Read the file of a round's end that `write_round_end` wrote. Return None if the file is missing or incomplete, if
    the number of ranks differs, or if a position has no prompt."""
    records = list(read_records(path)) if path.is_file() else []
    if not records:
        return None
    try:
        head: dict[str, Any] = json.loads(records[0].content)
        if head["ranks"] != ranks or head["groups"] != len(records) - 1:
            return None
        groups = []
        for record in records[1:]:
            prompt = prompt_at(record.position)
            if prompt is None:
                return None
            rollouts = group_of(record.content, prompt).group.rollouts
            if rollouts[0].input != prompt.input:
                raise JournalError(f"the group at position {prompt.position} is of another prompt")
            parts = tuple(map(PartialCompletion.of_record, rollouts))
            groups.append(GroupInFlight(prompt, parts, rollouts[0].policy_version))
        return RoundEnd(tuple(map(int, head["done"])), tuple(groups))
    except NONSENSE as error:
        raise JournalError(
            f"{path} can't be read ({type(error).__name__}: {error}). Put dataset and chat template back as they were, "
            "or drop the groups in flight by ignore_data_skip: true."
        ) from None

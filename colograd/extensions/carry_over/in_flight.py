"""Groups in flight: groups that a round of sampling with `carry_over` leaves for the next round.

round at step 7    draws 10 prompts, trains the 8 groups that finish first, carries 2 groups over
round at step 8    continues these 2 groups, draws 8 new prompts, ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from ...batch import FinishReason, Group, Logged, PackedRow, Prompt, Rollout
from ...engine.protocol import Sampled
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider, joined_riders
from ...rollout.group_records import NONSENSE, JournalError, RewardedGroup, group_bytes, group_of
from ...rollout.record_file import Record, RecordFile, read_records
from ...rollout.statistics import RolloutStatistics

FILE = "in_flight_{rank}.records"
HEAD = 0  # `Record.position` of a file's first record, which holds no group.


class VersionSpan(NamedTuple):
    """Consecutive tokens of a completion that were sampled with the same weights."""

    length: int
    version: int


@dataclass(frozen=True, slots=True)
class Versions(Rider):
    """Versions of the weights that sampled a completion. Without `Versions` all tokens have `Rollout.policy_version`.

    The round at step 7 sampled two tokens of this completion, and the round at step 8 two further tokens:

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
        return [[*span] for span in self.spans]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Any]], rollout: Rollout) -> Self:
        spans = tuple(VersionSpan(int(length), int(version)) for length, version in value)
        assert sum(span.length for span in spans) == len(rollout.completion_ids), "versions don't fit"
        return cls(spans)


@dataclass(frozen=True, slots=True, eq=False)
class TokenAges(RowRider):
    ages: torch.Tensor  # Age of each label (target token): optimizer steps since its sampling, (N,) float32.

    def metrics(self, difference: torch.Tensor, scored: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        old = scored * (self.ages > 0)
        return {"carry_over/old_logp_difference": ((difference * old).sum(), old.sum())}


def age_metrics(statistics: RolloutStatistics, metrics: dict[str, float]) -> None:
    if "carry_over/groups" in statistics.counts or "carry_over/ages" in statistics.counts:
        old, ages = (metrics.pop(f"carry_over/{name}", 0.0) for name in ("old_tokens", "ages"))
        tokens = max(sum(statistics.lengths), 1)
        metrics |= {"carry_over/old_tokens_share": old / tokens, "carry_over/mean_age": ages / tokens}
        metrics["carry_over/max_age"] = float(statistics.maxima.get("carry_over/max_age", 0))


def versions_of(rollout: Rollout) -> torch.Tensor:
    """Return the version of the weights that sampled each token of a completion, [C] int64."""
    versions = rollout.get(Versions)
    if versions is None:
        return torch.full((len(rollout.completion_ids),), rollout.policy_version)
    return torch.cat([torch.full((span.length,), span.version) for span in versions.spans])


def extended(rollout: Rollout, part: Sampled, version: int) -> Rollout:
    """Return an unfinished completion followed by tokens that the weights of ``version`` sampled."""
    versions, others = rollout.get(Versions), [r for r in rollout.riders if not isinstance(r, Versions)]
    spans = () if versions is None else versions.spans
    spans = (*spans, VersionSpan(len(part.ids), version)) if part.ids else spans
    riders = joined_riders([(others, len(rollout.completion_ids)), (part.riders, len(part.ids))], 0)
    riders = (*riders, Versions(spans)) if spans else riders
    ids = rollout.completion_ids + part.ids
    logprobs = torch.cat([rollout.sampler_logprobs, torch.tensor(part.logprobs, dtype=torch.float32)])
    sampled = torch.ones(len(ids), dtype=torch.bool)
    return Rollout(rollout.input, ids, logprobs, sampled, part.finish_reason, rollout.policy_version, riders=riders)


def is_whole(group: Group) -> bool:
    return all(rollout.finish_reason is not FinishReason.ABORT for rollout in group.rollouts)


def of_round(group: Group, version: int) -> Group:
    rollouts = []
    for rollout in group.rollouts:
        is_new = bool((versions_of(rollout) == version).all())
        riders = tuple(rider for rider in rollout.riders if not (is_new and isinstance(rider, Versions)))
        rollouts.append(dataclasses.replace(rollout, policy_version=version, riders=riders))
    return dataclasses.replace(group, rollouts=tuple(rollouts))


class RoundEnd(NamedTuple):
    done: tuple[int, ...]  # Positions of the groups that the round trains.
    carried: tuple[Group, ...]  # Groups that the next round continues, the oldest first.


@dataclass(slots=True)
class InFlight:
    """A rank's groups in flight. An unfinished completion has the finish reason ABORT. The `policy_version` of a
    group's rollouts is the step of the round that began the group."""

    takes: int  # Number of groups that a round trains.
    size: int  # Number of groups that are sampled at the same time.
    max_age: int  # Maximum number of optimizer steps between the beginning of a group and its last round.
    completions: int  # Number of completions in a group.
    longest: int  # Maximum number of tokens in a completion.
    groups: tuple[Group, ...] = ()  # Groups in flight, the oldest first.

    def begin(self, prompts: Sequence[Prompt], version: int) -> list[Group]:
        """Return a group per prompt: a carried group, or a new group without tokens."""
        begun = {
            group.position: group
            for group in self.groups
            if any(each.completion_ids or each.finish_reason is not FinishReason.ABORT for each in group.rollouts)
        }
        nothing = array("i"), torch.empty(0), torch.empty(0, dtype=torch.bool), FinishReason.ABORT, version
        new = (Group(p.example, (Rollout(p.input, *nothing),) * self.completions, p.position) for p in prompts)
        return [begun.get(group.position, group) for group in new]

    def due(self, groups: Sequence[Group], version: int) -> set[int]:
        """Return the positions of the groups that the round at step ``version`` must finish because of their age."""
        old = [group.position for group in groups if version - group.rollouts[0].policy_version >= self.max_age]
        return set(old[: self.takes])

    def save(self, folder: str | Path, rank: int, ranks: int) -> None:
        write_round_end(Path(folder, FILE.format(rank=rank)), RoundEnd((), self.groups), ranks)

    def load(self, folder: str | Path, rank: int, ranks: int, prompt_at: Callable[[int], Prompt]) -> str:
        """Load this rank's groups from a checkpoint. If groups are missing, drop all and return a warning, else ""."""
        end = read_round_end(Path(folder, FILE.format(rank=rank)), prompt_at, ranks)
        carried = () if end is None else end.carried
        if end is None:  # E.g. another number of ranks saved the groups: divide them.
            files = [*Path(folder).glob(FILE.format(rank="*"))]
            ends = [read_round_end(path, prompt_at, ranks=len(files)) for path in files]
            if None in ends:
                self.groups = ()
                return f"carry_over: {folder} lacks the groups in flight of some of its ranks: all are dropped."
            of_all = [group for end in ends if end is not None for group in end.carried]
            of_all.sort(key=lambda group: (group.rollouts[0].policy_version, group.position))
            carried = tuple(of_all[rank::ranks])
        groups = []
        for group in carried:
            if len(group.rollouts) != self.completions:
                raise JournalError(
                    f"{folder} has unfinished groups of {len(group.rollouts)} completions, but num_generations is "
                    f"{self.completions}: set num_generations back, or set ignore_data_skip: true to drop these groups."
                )
            parts = [*group.rollouts]
            for index, each in enumerate(parts):  # A smaller max_completion_length may finish a completion.
                if each.finish_reason is FinishReason.ABORT and len(each.completion_ids) >= self.longest:
                    parts[index] = dataclasses.replace(each, finish_reason=FinishReason.LENGTH)
            groups.append(dataclasses.replace(group, rollouts=tuple(parts)))
        self.groups = tuple(groups)
        return ""


def write_round_end(path: Path, end: RoundEnd, ranks: int) -> None:
    path.unlink(missing_ok=True)
    head = {"done": end.done, "ranks": ranks, "groups": len(end.carried)}
    with contextlib.closing(RecordFile(path)) as file:
        file.append(Record(HEAD, json.dumps(head).encode()))
        for group in end.carried:
            recorded = RewardedGroup(group, torch.zeros(len(group.rollouts), 1), Logged({}, {}))
            file.append(Record(group.position, group_bytes(recorded)))
        file.flush()


def read_round_end(path: Path, prompt_at: Callable[[int], Prompt | None], ranks: int) -> RoundEnd | None:
    """Read a file of `write_round_end`. Return None if the file is missing or incomplete.

    Also return None if another number of ranks wrote the file, or if ``prompt_at`` has no prompt for a group."""
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
            groups.append(group_of(record.content, prompt).group)
            if groups[-1].rollouts[0].input != prompt.input:
                raise JournalError(f"the dataset has other prompt tokens at position {prompt.position} than the file")
        return RoundEnd(tuple(map(int, head["done"])), tuple(groups))
    except NONSENSE as error:
        raise JournalError(
            f"{path} can't be read ({type(error).__name__}: {error}). Use the dataset and the chat template of the run "
            "that wrote it, or set ignore_data_skip: true to drop the groups in flight."
        ) from None

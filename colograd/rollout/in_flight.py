"""Groups in flight: what a round with `carry_over` leaves unfinished, as values that the next round goes on from.

    round at step 7    draws 10 prompts, trains the 8 groups that are done first, carries 2
    round at step 8    goes on with those 2, draws 8 new prompts, ...

Each group is trained once, whole; a token is sampled once. Their bytes are in a checkpoint, and after each round in the
rollout log.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch

from ..batch import FinishReason, Group, KeptTokens, ModelInput, Prompt, Rollout, VersionSpan
from ..config import GRPOConfig
from ..engine.protocol import Sampled
from .group_records import NONSENSE, JournalError, digest_of_example
from .record_file import Record, RecordFile, read_records

FILE = "in_flight_{rank}.records"  # in a checkpoint
WHOLE = 0  # the position of the only record
ROWS = pa.schema(
    [
        ("position", pa.int64()),
        ("since", pa.int64()),
        ("example", pa.string()),  # a digest of the dataset's row
        ("ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("spans", pa.list_(pa.int64())),  # length, version, length, version ...
        ("finish_reason", pa.string()),  # null: it goes on
        ("kept_ids", pa.list_(pa.int32())),  # null: all were drawn from the whole vocabulary
        ("kept_counts", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """What is there of a completion, which may be all of it."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # of the weights that sampled each token
    spans: tuple[VersionSpan, ...] = ()  # of all ids
    kept: KeptTokens | None = None
    finish_reason: FinishReason | None = None  # None: it goes on

    def extended(self, part: Sampled, version: int) -> PartialCompletion:
        """With what a request has sampled behind it."""
        ended = None if part.finish_reason is FinishReason.ABORT else part.finish_reason
        spans = (*self.spans, VersionSpan(len(part.ids), version)) if part.ids else self.spans
        kept = KeptTokens.joined([(self.kept, len(self.ids)), (part.kept, len(part.ids))])
        return PartialCompletion(self.ids + part.ids, self.logprobs + part.logprobs, spans, kept, ended)

    def rollout(self, prompt: ModelInput, version: int) -> Rollout:
        """The rollout of a whole completion, in the round at step ``version``."""
        assert self.finish_reason is not None
        return Rollout(
            input=prompt,
            completion_ids=self.ids,
            sampler_logprobs=torch.frombuffer(self.logprobs, dtype=torch.float32),
            sampled=torch.ones(len(self.ids), dtype=torch.bool),
            finish_reason=self.finish_reason,
            policy_version=version,
            kept=self.kept,
            spans=() if all(span.version == version for span in self.spans) else self.spans,
        )


@dataclass(frozen=True, slots=True)
class GroupInFlight:
    """A group of which some completions haven't ended, or that ended when its round had enough."""

    prompt: Prompt
    completions: tuple[PartialCompletion, ...]  # [G]
    since: int  # the step of the round that drew its prompt

    @property
    def is_whole(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def group(self, version: int) -> Group:
        """The whole group, in the round at step ``version``."""
        rollouts = tuple(completion.rollout(self.prompt.input, version) for completion in self.completions)
        return Group(self.prompt.example, rollouts, self.prompt.position)


class RoundEnd(NamedTuple):
    """How a round with `carry_over` ended on a rank."""

    done: tuple[int, ...]  # positions of the groups that it trains
    carried: tuple[GroupInFlight, ...]  # the oldest first


class InFlight:
    """The groups that a rank carries from round to round.

    Args:
        takes: groups that a round trains.
        size: groups that are sampled at once.
        max_age: optimizer steps for which a group may be carried.
    """

    def __init__(self, takes: int, size: int, max_age: int) -> None:
        self.takes, self.size, self.max_age = takes, size, max_age
        self.groups: tuple[GroupInFlight, ...] = ()  # the oldest first

    @classmethod
    def of(cls, config: GRPOConfig) -> Self | None:
        """Of a run; None: its rounds wait for all groups."""
        if config.carry_over is None:
            return None
        return cls(config.groups_per_round, config.groups_in_flight, config.carry_over_max_age * config.round_length)

    def pool(self, new: Sequence[Prompt], more_prompts: Callable[[int, int], list[Prompt]]) -> list[Prompt]:
        """The prompts of a round: of the groups that are carried, the new ones, and as many as are lacking.

        Args:
            more_prompts: (number drawn so far, number wanted) -> further prompts.
        """
        lacking = self.size - len(self.groups) - len(new)
        more = more_prompts(0, lacking) if lacking > 0 else []
        return [*(group.prompt for group in self.groups), *new, *more]

    def begin(self, prompts: Sequence[Prompt], n: int, version: int) -> list[GroupInFlight]:
        """The groups of a round's prompts as they are before it."""
        carried = {group.prompt.position: group for group in self.groups}
        return [
            carried.get(prompt.position) or GroupInFlight(prompt, (PartialCompletion(),) * n, since=version)
            for prompt in prompts
        ]

    def due(self, groups: Sequence[GroupInFlight], version: int) -> set[int]:
        """The positions of groups that can't be carried any further."""
        old = [group.prompt.position for group in groups if version - group.since >= self.max_age]
        return set(old[: self.takes])

    # -- in a checkpoint

    def save(self, folder: str | Path, rank: int, ranks: int) -> None:
        write_round_end(Path(folder, FILE.format(rank=rank)), RoundEnd((), self.groups), ranks)

    def load(self, folder: str | Path, rank: int, ranks: int, prompt_at: Callable[[int], Prompt]) -> None:
        """Take this rank's groups, or its share of what another number of ranks had in flight, if all of it is there.

        Raises:
            JournalError: a prompt isn't the one that was sampled.
        """
        own = read_round_end(Path(folder, FILE.format(rank=rank)), prompt_at, ranks)
        if own is not None:
            self.groups = own.carried
            return
        files = [*Path(folder).glob(FILE.format(rank="*"))]
        ends = [read_round_end(path, prompt_at, ranks=len(files)) for path in files]
        carried = [group for end in ends if end is not None for group in end.carried]
        carried = sorted(carried, key=lambda group: (group.since, group.prompt.position))
        self.groups = tuple(carried[rank::ranks]) if all(end is not None for end in ends) else ()


# -- its bytes


def write_round_end(path: Path, end: RoundEnd, ranks: int) -> None:
    """Write a file of one record, in the place of one that is there.

    Args:
        ranks: whose rounds take prompts together.

    Raises:
        OSError: the disk is full, or away.
    """
    path.unlink(missing_ok=True)
    file = RecordFile(path)
    try:
        file.append(Record(WHOLE, _bytes(end, ranks)))
        file.flush()
    finally:
        file.close()


def read_round_end(path: Path, prompt_at: Callable[[int], Prompt], ranks: int) -> RoundEnd | None:
    """What `write_round_end` wrote; None: nothing, a torn record, or that of another number of ranks.

    Raises:
        JournalError: a prompt isn't the one that was sampled, or the bytes are nonsense.
    """
    record = next(read_records(path), None) if path.is_file() else None
    if record is None:
        return None
    try:
        batch = pa.ipc.open_stream(record.content).read_all()
        batch.validate(full=True)
        about: dict[str, Any] = json.loads(batch.schema.metadata[b"round"])
        if about["ranks"] != ranks:
            return None
        groups: dict[int, GroupInFlight] = {}
        for row in batch.to_pylist():
            position = int(row["position"])
            prompt = groups[position].prompt if position in groups else prompt_at(position)
            if row["example"] != digest_of_example(prompt.example):
                raise JournalError(
                    f"{path} has a group in flight of another prompt at position {position}: the dataset or its order "
                    "has changed. Put it back, or begin anew."
                )
            before = groups[position].completions if position in groups else ()
            groups[position] = GroupInFlight(prompt, (*before, _completion(row)), int(row["since"]))
        return RoundEnd(tuple(map(int, about["done"])), tuple(groups.values()))
    except JournalError:
        raise
    except (pa.ArrowException, *NONSENSE) as error:
        raise JournalError(f"{path} can't be read ({type(error).__name__}: {error}): move it away.") from None


def _bytes(end: RoundEnd, ranks: int) -> bytes:
    rows = [(group, each) for group in end.carried for each in group.completions]

    def numbers(name: str, values: list[Any]) -> pa.Array:
        return pa.array(values, ROWS.field(name).type)

    kept = [None if each.kept is None else each.kept for _, each in rows]
    columns = [
        numbers("position", [group.prompt.position for group, _ in rows]),
        numbers("since", [group.since for group, _ in rows]),
        numbers("example", [digest_of_example(group.prompt.example) for group, _ in rows]),
        numbers("ids", [np.asarray(each.ids, dtype=np.int32) for _, each in rows]),
        numbers("logprobs", [np.asarray(each.logprobs, dtype=np.float32) for _, each in rows]),
        numbers("spans", [[n for span in each.spans for n in (span.length, span.version)] for _, each in rows]),
        numbers("finish_reason", [each.finish_reason and each.finish_reason.value for _, each in rows]),
        numbers("kept_ids", [None if of is None else of.ids.numpy() for of in kept]),
        numbers("kept_counts", [None if of is None else of.counts.numpy() for of in kept]),
    ]
    about = json.dumps({"done": end.done, "ranks": ranks})
    table = pa.table(columns, schema=ROWS.with_metadata({"round": about}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _completion(row: dict[str, Any]) -> PartialCompletion:
    ids, logprobs = array("i", row["ids"]), array("f", row["logprobs"])
    spans = tuple(VersionSpan(*pair) for pair in zip(row["spans"][::2], row["spans"][1::2], strict=True))
    assert len(ids) == len(logprobs) == sum(span.length for span in spans), "lengths differ"
    kept = None
    if row["kept_counts"] is not None:
        ids_kept, counts = (torch.tensor(row[name], dtype=torch.int32) for name in ("kept_ids", "kept_counts"))
        assert len(counts) == len(ids) and int(counts.sum()) == len(ids_kept), "the kept tokens don't fit"
        kept = KeptTokens(ids_kept, counts)
    reason = row["finish_reason"]
    return PartialCompletion(ids, logprobs, spans, kept, None if reason is None else FinishReason(reason))

"""Groups in flight: the unfinished groups of a round with `carry_over`. The next round continues them.

    round at step 7    draws 10 prompts, trains the 8 groups that are done first, carries 2
    round at step 8    continues these 2, draws 8 new prompts, ...

Each group is trained once, whole. Each token is sampled once. The bytes of the groups are in a checkpoint, and after
each round in the rollout log.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from ...batch import FinishReason, Group, ModelInput, Prompt, Rollout
from ...engine.protocol import Sampled
from ...riders import Rider, joined_riders
from ...rollout.group_records import NONSENSE, JournalError, digest_of_example, riders_bytes, with_riders
from ...rollout.record_file import Record, RecordFile, read_records
from .rider import Versions, VersionSpan

FILE = "in_flight_{rank}.records"  # file name in a checkpoint
HEAD = 0  # position of the first record: it has the number of groups that follow, one per record
ROWS = pa.schema(
    [
        ("since", pa.int64()),
        ("prompt", pa.string()),  # digests of the dataset's row and of the prompt's tokens
        ("ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("spans", pa.list_(pa.int64())),  # length, version, length, version ...
        ("finish_reason", pa.string()),  # null: unfinished
    ]
)


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The tokens sampled so far of one completion, unfinished or whole."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # [T], by the weights that sampled the token
    spans: tuple[VersionSpan, ...] = ()  # weight versions of all ids
    riders: tuple[Rider, ...] = ()
    finish_reason: FinishReason | None = None  # None: unfinished

    def extended(self, part: Sampled, version: int) -> PartialCompletion:
        """Return the completion with the tokens of a request appended."""
        ended = None if part.finish_reason is FinishReason.ABORT else part.finish_reason
        spans = (*self.spans, VersionSpan(len(part.ids), version)) if part.ids else self.spans
        riders = joined_riders([(self.riders, len(self.ids)), (part.riders, len(part.ids))], 0)
        return PartialCompletion(self.ids + part.ids, self.logprobs + part.logprobs, spans, riders, ended)

    def so_far(self, prompt: ModelInput) -> Rollout:
        """Return ids and riders as a rollout, for the riders' tables."""
        none = torch.empty(0)
        return Rollout(prompt, self.ids, none, none.bool(), FinishReason.ABORT, 0, riders=self.riders)

    def rollout(self, prompt: ModelInput, version: int) -> Rollout:
        """Return the rollout of a whole completion, in the round at step ``version``."""
        assert self.finish_reason is not None
        whole = Sampled(self.ids, self.logprobs, self.finish_reason, self.riders).rollout(prompt, version)
        if all(span.version == version for span in self.spans):
            return whole
        return whole.carrying(Versions(self.spans))


@dataclass(frozen=True, slots=True)
class GroupInFlight:
    """A group that isn't trained yet: some completions are unfinished, or it ended when its round had enough groups."""

    prompt: Prompt
    completions: tuple[PartialCompletion, ...]  # [G]
    since: int  # step of the round that began the group

    @property
    def is_whole(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def group(self, version: int) -> Group:
        """Return the whole group, in the round at step ``version``."""
        rollouts = tuple(completion.rollout(self.prompt.input, version) for completion in self.completions)
        return Group(self.prompt.example, rollouts, self.prompt.position)


class RoundEnd(NamedTuple):
    """The end of a round with `carry_over` on a rank."""

    done: tuple[int, ...]  # positions of the groups that the round trains
    carried: tuple[GroupInFlight, ...]  # the oldest first


class InFlight:
    """The groups that a rank carries from round to round.

    Args:
        takes: number of groups that a round trains.
        size: number of groups that are sampled at once.
        max_age: maximum number of optimizer steps that a group is carried.
        completions: number of completions in a group.
        longest: maximum number of tokens in a completion.
    """

    def __init__(self, takes: int, size: int, max_age: int, completions: int, longest: int) -> None:
        self.takes, self.size, self.max_age = takes, size, max_age
        self.completions, self.longest = completions, longest
        self.groups: tuple[GroupInFlight, ...] = ()  # the oldest first

    def begin(self, prompts: Sequence[Prompt], version: int) -> list[GroupInFlight]:
        """Return the groups of a round's prompts in their state before the round."""
        begun = {
            group.prompt.position: group
            for group in self.groups
            if any(completion.ids or completion.finish_reason for completion in group.completions)
        }
        new = (PartialCompletion(),) * self.completions
        return [begun.get(prompt.position) or GroupInFlight(prompt, new, since=version) for prompt in prompts]

    def due(self, groups: Sequence[GroupInFlight], version: int) -> set[int]:
        """Return the positions of groups that can't be carried any further."""
        old = [group.prompt.position for group in groups if version - group.since >= self.max_age]
        return set(old[: self.takes])

    # -- in a checkpoint

    def save(self, folder: str | Path, rank: int, ranks: int) -> None:
        write_round_end(Path(folder, FILE.format(rank=rank)), RoundEnd((), self.groups), ranks)

    def load(self, folder: str | Path, rank: int, ranks: int, prompt_at: Callable[[int], Prompt]) -> str:
        """Load this rank's groups, or its share of all groups if the number of ranks has changed.

        Returns: a warning that groups are missing, or "".
        """
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
                    f"{folder} has groups in flight of {len(group.completions)} completions, but num_generations is "
                    f"{self.completions}: set it back, or leave them out by ignore_data_skip: true."
                )
            completions = [  # those that have all tokens that they may have in this run end
                dataclasses.replace(each, finish_reason=FinishReason.LENGTH)
                if each.finish_reason is None and len(each.ids) >= self.longest
                else each
                for each in group.completions
            ]
            groups.append(dataclasses.replace(group, completions=tuple(completions)))
        self.groups = tuple(groups)
        return ""


# -- the bytes of groups in flight


def write_round_end(path: Path, end: RoundEnd, ranks: int) -> None:
    """Write the end of a round to a file, replacing an older file.

    Args:
        ranks: number of ranks that share a round's prompts.
    """
    path.unlink(missing_ok=True)
    file = RecordFile(path)
    head = {"done": end.done, "ranks": ranks, "groups": len(end.carried)}
    try:
        file.append(Record(HEAD, json.dumps(head).encode()))
        for group in end.carried:
            file.append(Record(group.prompt.position, _bytes(group)))
        file.flush()
    finally:
        file.close()


def read_round_end(path: Path, prompt_at: Callable[[int], Prompt | None], ranks: int) -> RoundEnd | None:
    """Read the file that `write_round_end` wrote.

    Return None if there is no file, if it is torn, if the number of ranks differs, or if a position has no prompt.
    """
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
            groups.append(_group(record.content, prompt, path))
        return RoundEnd(tuple(map(int, head["done"])), tuple(groups))
    except JournalError:
        raise
    except (pa.ArrowException, *NONSENSE) as error:
        raise JournalError(f"{path} can't be read ({type(error).__name__}: {error}): move it away.") from None


def _digest(prompt: Prompt) -> str:
    tokens = np.asarray(prompt.input.ids, dtype=np.int64).tobytes()
    return f"{digest_of_example(prompt.example)} {hashlib.blake2b(tokens, digest_size=16).hexdigest()}"


def _bytes(group: GroupInFlight) -> bytes:
    parts = group.completions

    def numbers(name: str, values: list[Any]) -> pa.Array:
        return pa.array(values, ROWS.field(name).type)

    columns = [
        numbers("since", [group.since] * len(parts)),
        numbers("prompt", [_digest(group.prompt)] * len(parts)),
        numbers("ids", [np.frombuffer(each.ids, dtype=np.int32) for each in parts]),
        numbers("logprobs", [np.frombuffer(each.logprobs, dtype=np.float32) for each in parts]),
        numbers("spans", [[n for span in each.spans for n in (span.length, span.version)] for each in parts]),
        numbers("finish_reason", [each.finish_reason and each.finish_reason.value for each in parts]),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS) as writer:
        writer.write_table(pa.table(columns, schema=ROWS))
    return bytes(sink.getvalue().to_pybytes()) + riders_bytes([each.so_far(group.prompt.input) for each in parts])


def _group(content: bytes, prompt: Prompt, path: Path) -> GroupInFlight:
    reader = pa.BufferReader(content)
    table = pa.ipc.open_stream(reader).read_all()
    table.validate(full=True)
    if any(digest != _digest(prompt) for digest in table["prompt"].to_pylist()):
        raise JournalError(
            f"{path} has a group in flight of another prompt at position {prompt.position}: the dataset, its order, or "
            "the chat template has changed. Put it back, or leave out what is in flight by ignore_data_skip: true."
        )
    parts = []
    for index, reason in enumerate(table["finish_reason"].to_pylist()):
        ids, logprobs, spans = (table[name][index].values.to_numpy() for name in ("ids", "logprobs", "spans"))
        assert len(ids) == len(logprobs) == spans[::2].sum(), "lengths differ"
        versions = tuple(VersionSpan(*pair) for pair in spans.reshape(-1, 2).tolist())
        own = array("i", ids.tobytes()), array("f", logprobs.tobytes()), versions
        parts.append(PartialCompletion(*own, finish_reason=None if reason is None else FinishReason(reason)))
    riders = [rollout.riders for rollout in with_riders(reader, [part.so_far(prompt.input) for part in parts])]
    whole = tuple(dataclasses.replace(part, riders=own) for part, own in zip(parts, riders, strict=True))
    return GroupInFlight(prompt, whole, table["since"][0].as_py())

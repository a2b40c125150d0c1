"""Steps of many ranks, simulated event by event: how long they take, and how long ranks are idle.

`overlap`: groups are trained as the trainer does, own ones, finished ones of others, and what is left is balanced.
`carry_over`: each rank ends its round with the groups that are done first, and goes on with the others in the next one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from colograd.parallel.balance import plan
from colograd.rollout.record_file import TABLE, read_records

PROMPT = 100  # tokens of a simulated prompt
LIVED_IN = 3  # rounds until as many groups come as go

Lengths = Sequence[Sequence[int]]  # of each group's completions, on one rank


@dataclass(frozen=True)
class Rates:
    engine_step: float
    sequence: float  # further seconds for each sequence of a step
    token: float  # seconds of training a token

    def tokens(self, number: int, running: int) -> float:
        """Return seconds in which each of ``running`` sequences gets ``number`` more tokens."""
        return number * (self.engine_step + self.sequence * running)


@dataclass(frozen=True)
class Decoded:
    ended: list[float]  # time of each group's end, or infinity
    left: list[list[int]]  # missing tokens of each group's completions
    seconds: float


def decode(
    groups: Lengths, sequences: int, rates: Rates, enough: Callable[[set[int]], bool] = lambda _: False
) -> Decoded:
    """Decode at most ``sequences`` at once, in their order. ``enough`` may stop earlier, given the finished groups."""
    queue = [(index, place) for index, lengths in enumerate(groups) for place, length in enumerate(lengths) if length]
    queue.reverse()
    missing = [sum(map(bool, lengths)) for lengths in groups]
    finished = {index for index, number in enumerate(missing) if not number}
    left = [list(lengths) for lengths in groups]
    running: list[tuple[int, int, int]] = []  # (engine step at the completion's end, group, completion)
    ended, steps, now = [0.0 if index in finished else math.inf for index in range(len(groups))], 0, 0.0
    while (queue or running) and not enough(finished):
        while queue and len(running) < sequences:
            index, place = queue.pop()
            heapq.heappush(running, (steps + groups[index][place], index, place))
        until = running[0][0]
        now += rates.tokens(until - steps, len(running))
        steps = until
        while running and running[0][0] == until:
            _, index, place = heapq.heappop(running)
            left[index][place], missing[index] = 0, missing[index] - 1
            if not missing[index]:
                ended[index] = now
                finished.add(index)
    for until, index, place in running:
        left[index][place] = until - steps
    return Decoded(ended, left, now)


@dataclass(frozen=True)
class Step:
    seconds: float
    idle: float  # share of the ranks' time that they neither sampled nor trained


def simulate(
    ranks: Sequence[Lengths], sequences: int, budget: int, rates: Rates, overlap: bool, prompt: int = PROMPT
) -> Step:
    """Simulate a step of all ranks. ``budget`` are tokens of a micro-batch, ``prompt`` tokens of each prompt."""
    finished = [decode(groups, sequences, rates).ended for groups in ranks]
    costs = [[prompt + sum(lengths) for lengths in groups] for groups in ranks]
    sampled = [max(of_rank) for of_rank in finished]
    left = [set(range(len(groups))) for groups in ranks]
    free = sampled[:]  # time at which each rank is free
    all_sampled, busy, hungry = max(sampled), sum(sampled), set[int]()
    events = [(at, rank) for rank, at in enumerate(sampled)] if overlap else []
    heapq.heapify(events)
    while events:
        now, rank = heapq.heappop(events)
        shares = 0
        if now >= all_sampled:
            if max(free) <= now:  # no rank is busy
                break
            shares = 1 + max(1, len(hungry))
        tokens = 0
        if not any(finished[rank][index] <= now for index in left[rank]):
            hungry.add(rank)
        others = sorted((other for other in range(len(ranks)) if other != rank), key=lambda other: -len(left[other]))
        for owner in (rank, *others):
            room = min(budget, sum(costs[owner][index] for index in left[owner]) // shares) if shares else budget
            ready = [index for index in left[owner] if finished[owner][index] <= now]
            for index in sorted(ready, key=lambda index: -costs[owner][index]):
                if not tokens or tokens + costs[owner][index] <= room:
                    tokens += costs[owner][index]
                    left[owner].discard(index)
            if tokens and (owner == rank or tokens >= room):
                break
        if tokens:
            busy += tokens * rates.token
            free[rank] = now + tokens * rates.token
            heapq.heappush(events, (free[rank], rank))
            continue
        coming = [finished[owner][index] for owner in range(len(ranks)) for index in left[owner]]
        waits = [at for at in (*coming, *free) if at > now]
        heapq.heappush(events, (min(waits, default=all_sampled), rank))
    rest = [[costs[rank][index] for index in sorted(left[rank])] for rank in range(len(ranks))]
    return _trained(max(all_sampled, *free), busy, rest, rates)


def _trained(ready: float, busy: float, costs: Sequence[Sequence[int]], rates: Rates) -> Step:
    """Simulate the training of a balanced step from ``ready`` on."""
    loads = [sum(costs[owner][index] for owner, index in row) * rates.token for row in plan(costs)]
    seconds = ready + max(loads)
    return Step(seconds, 1 - (busy + sum(loads)) / (seconds * len(costs)))


# -- completions that are carried over


@dataclass(frozen=True)
class _InFlight:
    lengths: Sequence[int]
    left: Sequence[int]
    age: int = 0  # number of rounds


def simulate_carried(
    rounds: Sequence[Sequence[Lengths]], sequences: int, rates: Rates, share: float, most_age: int = 2
) -> list[Step]:
    """Simulate steps with `carry_over`, without the first ones.

    Args:
        rounds: lengths of the groups of each round, on each rank.
        share: share of the groups sampled at once that a round takes.
    """
    takes = len(rounds[0][0])
    coming = [iter([groups for of_round in rounds for groups in of_round[rank]]) for rank in range(len(rounds[0]))]
    flight: list[list[_InFlight]] = [[] for _ in coming]
    steps = []
    for _ in range(len(rounds) - math.ceil((1 / share - 1) + 1e-9)):
        seconds, costs = [], []
        for rank, source in enumerate(coming):
            wanted = math.ceil(takes / share - 1e-9) - len(flight[rank])
            fresh = [_InFlight(lengths, lengths) for lengths in itertools.islice(source, wanted)]
            took, done, flight[rank] = _round(flight[rank] + fresh, takes, sequences, rates, most_age)
            seconds.append(took)
            costs.append(done)
        steps.append(_trained(max(seconds), sum(seconds), costs, rates))
    return steps[LIVED_IN:]


def _round(
    groups: Sequence[_InFlight], takes: int, sequences: int, rates: Rates, most_age: int
) -> tuple[float, list[int], list[_InFlight]]:
    """Simulate a rank's round. Return its seconds, the tokens of its groups, and the groups in flight."""
    must = {index for index, group in enumerate(groups) if group.age >= most_age}
    decoded = decode(
        [group.left for group in groups], sequences, rates, lambda ended: len(ended) >= takes and must <= ended
    )
    # A forward, a third of training, reads the prompts and tokens again.
    again = sum(
        PROMPT + whole - left
        for group in groups
        for whole, left in zip(group.lengths, group.left, strict=True)
        if 0 < left < whole
    )
    order = sorted(range(len(groups)), key=lambda index: (index not in must, decoded.ended[index]))
    taken = {index for index in order[:takes] if decoded.ended[index] < math.inf}
    done = [PROMPT + sum(groups[index].lengths) for index in sorted(taken)]
    behind = [
        replace(group, left=decoded.left[index], age=group.age + 1)
        for index, group in enumerate(groups)
        if index not in taken
    ]
    return decoded.seconds + again * rates.token / 3, done, behind


# -- lengths


@dataclass(frozen=True)
class LogNormal:
    """A prompt's median varies by ``spread`` (of the logarithm), its completions around it by ``within``."""

    median: float
    spread: float
    within: float
    longest: int
    completions: int

    def group(self, source: random.Random) -> Sequence[int]:
        median = self.median * source.lognormvariate(0.0, self.spread)
        drawn = (median * source.lognormvariate(0.0, self.within) for _ in range(self.completions))
        return [max(1, min(self.longest, int(length))) for length in drawn]


@dataclass(frozen=True)
class Recorded:
    """Groups of a run that kept its rollout log, drawn with replacement."""

    groups: Sequence[Sequence[int]]

    @classmethod
    def of(cls, run: Path) -> Recorded:
        found = [lengths for file in sorted(run.glob("_journal/step-*/rank-*.records")) for lengths in _lengths(file)]
        if not found:
            raise SystemExit(f"--run {run}: no groups are recorded there; train with journal: keep")
        return cls(found)

    def group(self, source: random.Random) -> Sequence[int]:
        return source.choice(self.groups)


def _lengths(file: Path) -> Iterator[list[int]]:
    for record in read_records(file, lambda position: position >= 0):
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.BufferReader(record.content)), TABLE)
        yield [max(1, len(completion)) for completion in batch["completion"]]


# -- a table


def table(
    source: LogNormal | Recorded, many: Sequence[int], groups: int, sequences: int, budget: int, rates: Rates,
    share: float, steps: int,
) -> Iterator[str]:  # fmt: skip
    """Return lines with the mean step: as it is, with `overlap` and with `carry_over`."""
    kinds = ("overlap", "carry_over")
    yield "| ranks | step, s | idle | " + " | ".join(f"{kind}, s | faster | idle" for kind in kinds) + " |"
    yield "|" + " ---: |" * (3 + 3 * len(kinds))
    for ranks in many:
        seeds = [random.Random(seed) for seed in range(steps)]
        drawn = [[[source.group(seed) for _ in range(groups)] for _ in range(ranks)] for seed in seeds]
        without, *others = [
            [simulate(of_step, sequences, budget, rates, overlap=False) for of_step in drawn],
            [simulate(of_step, sequences, budget, rates, overlap=True) for of_step in drawn],
            simulate_carried(drawn * 4, sequences, rates, share),
        ]
        usual, idle = _means(without)
        cells = [f"{usual:.1f} | {idle:.0%}"]
        for seconds, idle in map(_means, others):
            cells.append(f"{seconds:.1f} | {usual / seconds:.2f} x | {idle:.0%}")
        yield f"| {ranks} | " + " | ".join(cells) + " |"


def _means(steps: Sequence[Step]) -> tuple[float, float]:
    return statistics.mean(step.seconds for step in steps), statistics.mean(step.idle for step in steps)

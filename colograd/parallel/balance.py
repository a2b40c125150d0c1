"""Assignment of groups to the ranks that train them. The ranks of one engine divide its groups. Ranks that train each
row together, with parts of the policy or of the row, are a team and count as one. Groups move from slow teams to fast.

A step is as slow as its slowest rank, and lengths differ by luck. The denominators are global and gradients are summed,
so moving a group to another rank changes only rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..batch import ScoredGroup
from ..runtime.sizes import size_of
from .ranks import deliver, gather, rank

Place = tuple[int, int]  # (the rank that sampled a group, its index there)
MIN_GAIN = 0.1  # least saving that justifies moves, as a fraction of the slowest team's cost


def pair_cost(config: Any, num_parameters: int) -> float:
    """Return the cost of one query-key pair (4 * heads * head_dim FLOPs per layer), in tokens (2 per parameter)."""
    layers, heads = size_of(config, "num_hidden_layers"), size_of(config, "num_attention_heads")
    size = size_of(config, "head_dim") or size_of(config, "hidden_size") // max(heads, 1)
    return 2.0 * layers * heads * size / max(num_parameters, 1)


def cost(group: ScoredGroup, pair: float, share_prompts: bool) -> float:
    """Return the cost of training a group, in tokens: its tokens, plus ``pair`` (see `pair_cost`) for each query-key
    pair. With ``share_prompts`` a prompt is computed once per group, not once per completion."""
    rollouts = group.group.rollouts
    sizes = [(p, b.length) for r in rollouts for p, b in zip(r.context_lengths, r.tree, strict=True)]
    if not share_prompts:
        return sum(p + c + pair * (p + c) ** 2 / 2 for p, c in sizes)
    prompts = [len(prompt) for prompt in {rollout.input for rollout in rollouts}]
    pairs = sum(p**2 / 2 for p in prompts) + sum(c * p + c**2 / 2 for p, c in sizes)
    return sum(prompts) + sum(c for _, c in sizes) + pair * pairs


def share_out(costs: Sequence[Sequence[float]], ranks_per_engine: int = 1, ranks_per_row: int = 1) -> list[list[Place]]:
    """Divide each engine's groups among the teams of its ranks: the costliest first, each to the least loaded team. A
    team may have several engines. ``costs`` has the cost of each group, per rank that sampled it. Return the places of
    each team's groups."""
    near = math.lcm(ranks_per_engine, ranks_per_row) // ranks_per_row  # teams that share engines
    assigned: list[list[Place]] = [[] for _ in range(len(costs) // ranks_per_row)]
    loads = [0.0] * len(assigned)
    for owner, row in enumerate(costs):
        first = owner // (near * ranks_per_row) * near
        for index in sorted(range(len(row)), key=lambda i: -row[i]):
            least = min(range(first, first + near), key=lambda team: loads[team])
            assigned[least].append((owner, index))
            loads[least] += row[index]
    return [sorted(row) for row in assigned]


def plan(costs: Sequence[Sequence[float]], ranks_per_engine: int = 1, ranks_per_row: int = 1) -> list[list[Place]]:
    """Divide groups as `share_out` does, then move and swap groups between the slowest and the fastest team until none
    narrows the gap. All moves are dropped if the slowest team gains no more than `MIN_GAIN`."""
    initial = share_out(costs, ranks_per_engine, ranks_per_row)
    assigned = [list(row) for row in initial]

    def cost_of(place: Place) -> float:
        return costs[place[0]][place[1]]

    loads = [sum(map(cost_of, row)) for row in initial]
    slowest = max(loads)
    for _ in range(sum(len(row) for row in costs)):
        slow, fast = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[slow] - loads[fast]
        # Moving `give` for `take` narrows the gap by twice their difference.
        options: list[tuple[float, Place, Place | None]] = [
            (cost_of(give) - (cost_of(take) if take else 0.0), give, take)
            for give in assigned[slow]
            for take in (None, *assigned[fast])
        ]
        useful = [option for option in options if 0.0 < option[0] < gap]
        if not useful or gap < 0.01 * loads[slow]:
            break
        gain, give, take = min(useful, key=lambda option: abs(option[0] - gap / 2))
        assigned[slow].remove(give)
        assigned[fast].append(give)
        if take:
            assigned[fast].remove(take)
            assigned[slow].append(take)
        loads[slow] -= gain
        loads[fast] += gain
    return [sorted(row) for row in assigned] if slowest - max(loads) > MIN_GAIN * slowest else initial


def balance(
    groups: Sequence[ScoredGroup],
    pair: float,
    share_prompts: bool,
    ranks_per_engine: int = 1,
    between_engines: bool = True,
    ranks_per_row: int = 1,
) -> tuple[list[ScoredGroup], int]:
    """Exchange the groups that ranks sampled so that each has the groups that it trains. A collective. Unless
    ``between_engines``, groups stay with the engines of a team. Return this rank's groups, and how many of them came
    from engines outside its team."""
    costs = gather([cost(group, pair, share_prompts) for group in groups])
    teams = (plan if between_engines else share_out)(costs, ranks_per_engine, ranks_per_row)
    assignment = [team for team in teams for _ in range(ranks_per_row)]
    me, near = rank(), math.lcm(ranks_per_engine, ranks_per_row)
    num_moved = sum(owner // near != me // near for owner, _ in assignment[me])
    return exchange(groups, assignment), num_moved


def exchange(groups: Sequence[ScoredGroup], assignment: Sequence[Sequence[Place]]) -> list[ScoredGroup]:
    """Return the groups that the assignment, the same on all ranks, has for this rank. A collective."""
    me = rank()
    if all(owner == trainer for trainer, row in enumerate(assignment) for owner, _ in row):
        return [groups[index] for _, index in assignment[me]]
    outgoing = {
        trainer: {place: groups[place[1]].for_training() for place in row if place[0] == me}
        for trainer, row in enumerate(assignment)
        if trainer != me and any(owner == me for owner, _ in row)
    }
    received = deliver(outgoing, {owner for owner, _ in assignment[me] if owner != me})
    incoming = {place: group for message in received.values() for place, group in message.items()}
    return [groups[index] if owner == me else incoming[owner, index] for owner, index in assignment[me]]

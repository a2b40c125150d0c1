"""Assign scored groups to ranks, so that all ranks train about equally long.

A team is a set of ranks that train each row together. A block is the smallest set of consecutive ranks that
consists of whole teams and of whole vLLM engines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..batch import ScoredGroup
from ..runtime.sizes import size_of
from .ranks import deliver, gather, rank

Place = tuple[int, int]  # (rank that sampled a group, the group's index among that rank's groups)
MIN_GAIN = 0.1  # Fraction of the slowest team's cost that `plan` must save, or groups stay as in `share_out`.


def pair_cost(config: Any, num_parameters: int) -> float:
    """Return the FLOPs of a query-key pair of attention, divided by a token's FLOPs in products with weights.

    A pair takes 4 * heads * head_dim FLOPs per layer. A token takes 2 FLOPs per parameter."""
    layers, heads = size_of(config, "num_hidden_layers"), size_of(config, "num_attention_heads")
    size = size_of(config, "head_dim") or size_of(config, "hidden_size") // max(heads, 1)
    return 2.0 * layers * heads * size / max(num_parameters, 1)


def cost(group: ScoredGroup, pair: float, share_prompts: bool) -> float:
    """Return the cost of training a group, in tokens. ``pair`` is the cost of a query-key pair in tokens."""
    rollouts = group.group.rollouts
    sizes = [(one.context, one.length) for rollout in rollouts for one in rollout.segments]
    if not share_prompts:
        return sum(p + c + pair * (p + c) ** 2 / 2 for p, c in sizes)
    prompts = [len(prompt) for prompt in {rollout.input for rollout in rollouts}]
    pairs = sum(p**2 / 2 for p in prompts) + sum(c * p + c**2 / 2 for p, c in sizes)
    return sum(prompts) + sum(c for _, c in sizes) + pair * pairs


def share_out(costs: Sequence[Sequence[float]], ranks_per_engine: int = 1, ranks_per_row: int = 1) -> list[list[Place]]:
    """Assign each group to the least loaded team in the block of the rank that sampled the group.

    Return the `Place`s of each team's groups. The module's docstring defines teams and blocks."""
    near = math.lcm(ranks_per_engine, ranks_per_row) // ranks_per_row
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
    """Improve the result of `share_out`: move or swap groups between the slowest and the fastest team.

    Return `share_out`'s result unless the largest cost of a team falls by more than the fraction `MIN_GAIN`."""
    initial = share_out(costs, ranks_per_engine, ranks_per_row)
    assigned, cost_of = [list(row) for row in initial], dict[Place | None, float]({None: 0.0})
    cost_of |= {(owner, index): each for owner, row in enumerate(costs) for index, each in enumerate(row)}
    loads = [sum(cost_of[place] for place in row) for row in initial]
    slowest = max(loads)
    for _ in range(sum(len(row) for row in costs)):
        slow, fast = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[slow] - loads[fast]
        # A swap of group `give` for group `take` (None: a move) shrinks the gap by twice their difference in cost.
        pairs = itertools.product(assigned[slow], (None, *assigned[fast]))
        options = [(cost_of[give] - cost_of[take], give, take) for give, take in pairs]
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
    groups: Sequence[ScoredGroup], pair: float, share_prompts: bool, ranks_per_engine: int = 1,
    between_engines: bool = True, ranks_per_row: int = 1,
) -> tuple[list[ScoredGroup], int]:  # fmt: skip
    """Return the groups that this rank trains, and how many of them came from another block of ranks. A collective."""
    costs = gather([cost(group, pair, share_prompts) for group in groups])
    teams = (plan if between_engines else share_out)(costs, ranks_per_engine, ranks_per_row)
    assignment = [team for team in teams for _ in range(ranks_per_row)]
    me, near = rank(), math.lcm(ranks_per_engine, ranks_per_row)
    num_moved = sum(owner // near != me // near for owner, _ in assignment[me])
    return exchange(groups, assignment), num_moved


def exchange(groups: Sequence[ScoredGroup], assignment: Sequence[Sequence[Place]]) -> list[ScoredGroup]:
    """Return the groups that this rank trains. A collective, unless every rank trains only groups that it sampled.

    ``assignment`` has, for each rank, the `Place`s of the groups to train. It must be equal on all ranks."""
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

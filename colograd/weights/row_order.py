"""Detection of rows that vLLM stores in another order than checkpoints.

Examples are queries, keys and values that are interleaved by head (BLOOM, GPT-NeoX), and the halves of each pair of
rotated dimensions (Llama 4). Names and shapes don't show the order, but values do: policy and engine have loaded the
same checkpoint. The bias of a layer takes the order of its weight, because biases of zeros show none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from .mapping import Slice

# Largest distance of a 4-bit weight, relative to the weight's norm. Normal weights have 0.1, unrelated weights 1.4.
QUANTISED = 0.5


def is_near(part: Slice) -> bool:
    """Return whether the engine's values equal the policy's up to rounding to a few bits or a little training.

    Unrelated weights differ by more than their norm.
    """
    policy_value = part.held.to(part.destination.device).float()  # the policy may still be in host memory
    distance = torch.linalg.vector_norm(part.destination.float() - policy_value)
    return bool(distance <= QUANTISED * torch.linalg.vector_norm(policy_value))


def with_row_orders(slices: Sequence[Slice], policy: torch.nn.Module, place: int = 0, ranks: int = 1) -> list[Slice]:
    """Return ``slices``, with `Slice.rows` set where the engine has the rows in another known order.

    Args:
        slices: the parameters' places in the engine.
        policy: the policy.
        place: index of this rank among the ranks of its engine.
        ranks: number of ranks of the engine.
    """
    heads = _heads(policy)
    row_orders: dict[str, torch.Tensor] = {}  # by layer
    for part in slices:
        layer = part.name.rpartition(".")[0]
        if part.source.dim() != 2 or layer in row_orders or part.again or part.equal() or is_near(part):
            continue
        for order in _orders(part.source.shape[0], heads):
            for rows in _of_rank(order, part, place, ranks):
                if len(rows) == len(part.destination) and is_near(_in_order(part, rows)):
                    row_orders.setdefault(layer, rows.to(part.destination.device))
    if not row_orders:
        return list(slices)
    pairs = ((part, row_orders.get(part.name.rpartition(".")[0])) for part in slices)
    return [part if rows is None else _in_order(part, rows) for part, rows in pairs]


def _in_order(part: Slice, rows: torch.Tensor) -> Slice:
    return dataclasses.replace(part, rows=rows, cut=())


def _heads(policy: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads."""
    config = getattr(policy.config, "get_text_config", lambda: policy.config)()
    queries = int(getattr(config, "num_attention_heads", 0) or 1)
    return queries, int(getattr(config, "num_key_value_heads", 0) or queries)


Order = Sequence[torch.Tensor]  # the policy's rows in the engine's order, one tensor per part that ranks divide


def _orders(total: int, heads: tuple[int, int]) -> Iterator[Order]:
    """Yield the known orders of ``total`` rows."""
    rows, (queries, keys) = torch.arange(total), heads
    group = queries // keys  # a group of query heads is followed by its key head and value head
    if total % (keys * (group + 2)) == 0:
        by_head = rows.view(keys, group + 2, -1)
        yield [part.flatten() for part in (by_head[:, :group], by_head[:, group], by_head[:, group + 1])]
    for number in {queries, keys}:
        if total % (2 * number) == 0:
            yield [rows.view(number, -1, 2).mT.flatten()]
            yield [rows.view(number, 2, -1).mT.flatten()]


def _of_rank(order: Order, part: Slice, place: int, ranks: int) -> Iterator[torch.Tensor]:
    """Yield the possible rows of a rank: a share of each part of the order."""
    if all(len(rows) % ranks == 0 for rows in order):
        yield torch.cat([rows.chunk(ranks)[place] for rows in order])
    if ranks > 1 and len(order) == 1:  # neighbouring ranks may have the same keys
        yield order[0][part.cut[0]] if part.cut else order[0]

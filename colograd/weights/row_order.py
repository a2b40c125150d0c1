"""Rows that vLLM keeps in another order than checkpoints do: queries, keys and values that lie head by head (BLOOM,
GPT-NeoX), the two halves of each pair of rotated dimensions (Llama 4).

No name and no shape tells the order. Values do: policy and engine have loaded the same checkpoint. The bias of a layer
has the order of its weight, as biases of zeros tell none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from .mapping import Slice

# Of a weight's length, by which one of 4 bits may differ from it: 0.1 for normal ones, other weights by 1.4.
QUANTISED = 0.5


def is_near(part: Slice) -> bool:
    """Whether the engine's values differ from the policy's by rounding to a few bits, or by little training; other
    weights differ by more than their length."""
    policy_value = part.held.to(part.destination.device).float()  # the policy may still be in host memory
    distance = torch.linalg.vector_norm(part.destination.float() - policy_value)
    return bool(distance <= QUANTISED * torch.linalg.vector_norm(policy_value))


def with_row_orders(slices: Sequence[Slice], policy: torch.nn.Module, place: int = 0, ranks: int = 1) -> list[Slice]:
    """``slices``, with the order of those that the engine has in another known one.

    Args:
        place: of this rank among the ``ranks`` of its engine.
    """
    heads = _heads(policy)
    found: dict[str, torch.Tensor] = {}  # by layer
    for part in slices:
        layer = part.name.rpartition(".")[0]
        if part.source.dim() != 2 or layer in found or part.again or part.equal() or is_near(part):
            continue
        for order in _orders(part.source.shape[0], heads):
            for rows in _of_rank(order, part, place, ranks):
                if len(rows) == len(part.destination) and is_near(_in_order(part, rows)):
                    found.setdefault(layer, rows.to(part.destination.device))
    if not found:
        return list(slices)
    named = ((part, found.get(part.name.rpartition(".")[0])) for part in slices)
    return [part if rows is None else _in_order(part, rows) for part, rows in named]


def _in_order(part: Slice, rows: torch.Tensor) -> Slice:
    return dataclasses.replace(part, rows=rows, cut=())


def _heads(policy: torch.nn.Module) -> tuple[int, int]:
    """Of queries, and of keys."""
    config = getattr(policy.config, "get_text_config", lambda: policy.config)()
    queries = int(getattr(config, "num_attention_heads", 0) or 1)
    return queries, int(getattr(config, "num_key_value_heads", 0) or queries)


Order = Sequence[torch.Tensor]  # the policy's rows in the engine's order, one tensor per part that ranks divide


def _orders(total: int, heads: tuple[int, int]) -> Iterator[Order]:
    rows, (queries, keys) = torch.arange(total), heads
    group = queries // keys  # queries, a key and a value lie together
    if total % (keys * (group + 2)) == 0:
        by_head = rows.view(keys, group + 2, -1)
        yield [part.flatten() for part in (by_head[:, :group], by_head[:, group], by_head[:, group + 1])]
    for number in {queries, keys}:
        if total % (2 * number) == 0:
            yield [rows.view(number, -1, 2).mT.flatten()]
            yield [rows.view(number, 2, -1).mT.flatten()]


def _of_rank(order: Order, part: Slice, place: int, ranks: int) -> Iterator[torch.Tensor]:
    """A rank's rows: some of each part of the order."""
    if all(len(rows) % ranks == 0 for rows in order):
        yield torch.cat([rows.chunk(ranks)[place] for rows in order])
    if ranks > 1 and len(order) == 1:  # keys that neighbours repeat
        yield order[0][part.cut[0]] if part.cut else order[0]

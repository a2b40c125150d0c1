"""Detection of rows that vLLM stores in another order than checkpoints.

vLLM reorders, for example, queries, keys and values that a checkpoint interleaves by head (BLOOM, GPT-NeoX), and the
halves of each pair of rotated dimensions (Llama 4). Names and shapes don't show the order, but values do, because
policy and engine have loaded the same checkpoint. A bias gets the order of its layer's weight, because a bias of zeros
shows no order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from .mapping import Slice

# QUANTISED: largest distance of a weight from its 4-bit copy, relative to the weight's norm. Normal weights have a
# distance of 0.1, and unrelated weights 1.4.
QUANTISED = 0.5


def is_near(part: Slice) -> bool:
    """Return whether policy and engine differ by at most 0.5 of the policy's norm. Unrelated weights differ by 1.4."""
    policy_value = part.held.to(part.destination.device).float()  # the policy may be in host memory
    distance = torch.linalg.vector_norm(part.destination.float() - policy_value)
    return bool(distance <= QUANTISED * torch.linalg.vector_norm(policy_value))


def with_row_orders(slices: Sequence[Slice], policy: torch.nn.Module, place: int = 0, ranks: int = 1) -> list[Slice]:
    """Return ``slices`` with `Slice.rows` set if the engine's rows have another order than the policy's rows."""
    config = getattr(policy.config, "get_text_config", lambda: policy.config)()
    queries = int(getattr(config, "num_attention_heads", 0) or 1)
    keys = int(getattr(config, "num_key_value_heads", 0) or queries)
    row_orders: dict[str, torch.Tensor] = {}  # row indices by layer name
    for part in slices:
        layer = part.name.rpartition(".")[0]
        if part.source.dim() != 2 or layer in row_orders or part.again or part.equal() or is_near(part):
            continue
        for order in _orders(part.source.shape[0], queries, keys):
            of_rank = []
            if all(len(rows) % ranks == 0 for rows in order):  # each rank has a part of each tensor
                of_rank.append(torch.cat([rows.chunk(ranks)[place] for rows in order]))
            if ranks > 1 and len(order) == 1:  # neighbouring ranks may hold the same key heads
                of_rank.append(order[0][part.cut[0]] if part.cut else order[0])
            for rows in of_rank:
                if len(rows) == len(part.destination) and is_near(dataclasses.replace(part, rows=rows, cut=())):
                    row_orders.setdefault(layer, rows.to(part.destination.device))
    pairs = ((part, row_orders.get(part.name.rpartition(".")[0])) for part in slices)
    return [part if rows is None else dataclasses.replace(part, rows=rows, cut=()) for part, rows in pairs]


def _orders(total: int, queries: int, keys: int) -> Iterator[Sequence[torch.Tensor]]:
    """Yield each known order of a matrix of ``total`` rows, for ``queries`` query heads and ``keys`` key heads.

    An order is a list of tensors: the row indices of the policy in the engine's order. An engine's ranks divide each
    tensor.
    """
    rows, group = torch.arange(total), queries // keys
    if total % (keys * (group + 2)) == 0:  # checkpoint rows: query heads of a group, their key head, their value head
        by_head = rows.view(keys, group + 2, -1)
        yield [part.flatten() for part in (by_head[:, :group], by_head[:, group], by_head[:, group + 1])]
    for number in {queries, keys}:
        if total % (2 * number) == 0:
            yield [rows.view(number, -1, 2).mT.flatten()]
            yield [rows.view(number, 2, -1).mT.flatten()]

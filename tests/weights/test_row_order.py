"""Rows that the engine has in another order than the policy: head by head, or by halves of what is rotated in pairs."""

from __future__ import annotations

import pytest
import torch
from needs import has
from transformers import LlamaConfig

from colograd.weights.mapping import Slice, with_row_orders
from colograd.weights.sync import copy, obstacle

HEADS, KEYS, SIZE, WIDTH = 8, 4, 6, 5


def by_head(rows: torch.Tensor, place: int, ranks: int) -> torch.Tensor:
    """A rank's queries, keys and values, of checkpoints that have a key and a value behind each group of queries."""
    parts = rows.view(KEYS, HEADS // KEYS + 2, SIZE, -1).split([HEADS // KEYS, 1, 1], dim=1)
    chunks = [part.reshape(-1, rows[0].numel()).chunk(ranks)[place] for part in parts]
    return torch.cat(chunks).view(-1, *rows.shape[1:])


def by_halves(rows: torch.Tensor, place: int, ranks: int) -> torch.Tensor:
    turned = rows.view(HEADS, SIZE // 2, 2, -1).transpose(1, 2)  # as vLLM's loader of Llama 4
    return turned.reshape(rows.shape).chunk(ranks)[place]


@pytest.mark.parametrize(("place", "ranks"), [(0, 1), (1, 2)])
@pytest.mark.parametrize(("order", "heads"), [(by_head, HEADS + 2 * KEYS), (by_halves, HEADS)])
def test_row_order_is_detected_and_kept_when_publishing(order, heads, place: int, ranks: int) -> None:
    policy = torch.nn.Linear(WIDTH, heads * SIZE)
    policy.config = LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=KEYS)  # type: ignore[assignment]
    torch.nn.init.zeros_(policy.bias)  # which fits in any order
    engine = {f"layer.{name}": order(p.detach(), place, ranks).clone() for name, p in policy.named_parameters()}
    own = engine["layer.weight"].shape[0]
    cut = (slice(place * own, (place + 1) * own),) if ranks > 1 else ()
    plain = [Slice(f"layer.{n}", p, engine[f"layer.{n}"], cut) for n, p in policy.named_parameters()]
    parts = with_row_orders(plain, policy, place, ranks)
    assert all(part.equal() and obstacle(part) == "the engine has its rows in another order" for part in parts)

    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.rand_like(parameter))
    copy(parts)
    for (name, parameter), part in zip(policy.named_parameters(), parts, strict=True):
        wanted = order(parameter.detach(), place, ranks)
        assert torch.equal(engine[f"layer.{name}"], wanted)
        if not has("fsdp"):
            continue
        from colograd.extensions.fsdp.rows import Rows, place_of

        target = torch.zeros_like(wanted)
        for first in range(0, len(parameter), 7):  # as ranks that hold some rows gather them
            where, values = place_of(part, Rows(name, first, parameter.detach()[first : first + 7], len(parameter)))
            target[where] = values
        assert torch.equal(target, wanted)


def test_trained_or_rounded_values_keep_checkpoint_order() -> None:
    policy = torch.nn.Linear(WIDTH, HEADS * SIZE)
    policy.config = LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=HEADS)  # type: ignore[assignment]
    near = (policy.weight.detach() * 1.1).bfloat16()
    assert [part.rows for part in with_row_orders([Slice("layer.weight", policy.weight, near)], policy)] == [None]

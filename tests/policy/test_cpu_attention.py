"""Attention on a CPU without products of bfloat16: torch's fused calls, and a backward in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from colograd.policy import attention, merged_attention
from colograd.runtime import cpu_products

KEYS = 20


def inputs(queries: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 6, queries, 16), (1, 2, KEYS, 16), (1, 2, KEYS, 16)]
    return [torch.randn(shape, generator=draw).bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kind", ["causal", "window", "all keys"])
def test_gradients_are_those_of_float32_rounded_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "wanted", lambda: True)
    rows, causal, mask = inputs(7 if kind == "all keys" else KEYS), kind == "causal", None
    if kind == "window":
        distance = torch.arange(KEYS)[:, None] - torch.arange(KEYS)
        mask = (distance >= 0) & (distance < 3)
    assert merged_attention.slow(rows[0]) and not merged_attention.slow(rows[0].float())
    found = attention._fused(*rows, mask, 0.0, 0.3, causal)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    given = torch.autograd.grad(found, rows, gradient)

    exact = [x.detach().float().requires_grad_() for x in rows]
    expected = F.scaled_dot_product_attention(*exact, mask, is_causal=causal, scale=0.3, enable_gqa=True)
    wanted = torch.autograd.grad(expected, exact, gradient.float())
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)
    for of, whole in zip(given, wanted, strict=True):
        assert of.dtype == torch.bfloat16
        assert float((of.float() - whole).norm() / whole.norm()) < 0.006, "more than the rounding of what was kept"


def test_what_the_backward_keeps_is_in_the_row_s_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "wanted", lambda: True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention._fused(*inputs(KEYS), None, 0.0, None, True)
    assert sorted(str(x.dtype) for x in kept) == ["torch.bfloat16"] * 4 + ["torch.float32"]
    assert next(x for x in kept if x.dtype == torch.float32).shape == (KEYS, 6), "the log-sum-exps"

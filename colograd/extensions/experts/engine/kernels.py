"""A mixture's experts on a CPU as plain products. Their weights stay as loaded, so that a publish can write them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, linear, silu

# Constants of gpt-oss. Its gates and ups alternate, and both are clamped.
SLOPE, LIMIT = 1.702, 7.0


@torch.no_grad()
def apply_experts(
    kernel: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, *unused: Any, **given: Any,
) -> None:  # fmt: skip
    """Write the weighted sum of each token's experts into ``output``. vLLM's kernels have the same signature.

    Args:
        output, hidden_states: (T, H).
        w1: (E, 2I, H), gates and ups of each expert.
        w2: (E, H, I), output projection of each expert.
        topk_weights, topk_ids: (T, K), weights and numbers of each token's experts.
    """
    count, (tokens, chosen) = len(w1), topk_ids.shape
    activate = ACTIVATIONS[str(activation.value)]
    experts, order = topk_ids.flatten().sort(stable=True)
    inputs = hidden_states[order // chosen].split(torch.bincount(experts, minlength=count).tolist())
    found = hidden_states.new_empty(tokens * chosen, w2.shape[1])

    def one(e: int, x: torch.Tensor) -> torch.Tensor:
        return linear(activate(linear(x, w1[e], _of(kernel.w1_bias, e))), w2[e], _of(kernel.w2_bias, e))

    found[order] = torch.cat([one(expert, x) for expert, x in enumerate(inputs)])
    shares = torch.ones_like(topk_weights) if given.get("apply_router_weight_on_input") else topk_weights
    output.copy_((found.view(tokens, chosen, -1) * shares[..., None]).sum(1))


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _clamped(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(SLOPE * gate)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _gated(silu),
    "gelu": _gated(gelu),
    "gelu_tanh": _gated(functools.partial(gelu, approximate="tanh")),
    "swigluoai": _clamped,
}

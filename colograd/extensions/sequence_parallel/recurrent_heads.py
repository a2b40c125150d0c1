"""Recurrent layers with sequence parallelism: each rank runs the recurrence of all tokens for some heads or channels.

The ranks exchange projections of their tokens. Then each rank runs transformers' recurrence over all tokens, with a
stand-in for the layer: an object that has only the parameters of the rank's heads. Outputs are exchanged back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch

from ...policy.attention import RowPart

SAME = torch.nn.Identity()  # Stand-in for a projection that the rank computes before or after the recurrence.
Run = Callable[[Any, torch.Tensor], torch.Tensor]  # Function (layer, inputs) that runs a packed row, (1, T, C).


class _StandIn:
    def __init__(self, mixer: torch.nn.Module, **own: Any) -> None:
        self.__dict__.update(own, mixer=mixer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mixer, name)


def _convolution(convolution: torch.nn.Conv1d, own: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    bias = None if convolution.bias is None else own(convolution.bias)
    return SimpleNamespace(weight=own(convolution.weight), bias=bias)


def _short_convolution(mixer: Any, hidden: torch.Tensor, part: RowPart, run: Run) -> torch.Tensor:
    """Run LFM2's short convolution: (1, own tokens, hidden) -> the same shape. The ranks exchange three values
    of each channel: two gates and the input."""
    projected = mixer.in_proj(hidden).unflatten(-1, (3, -1)).transpose(2, 3)  # Shape (1, tokens, channels, 3).
    convolution = _convolution(mixer.conv, part.own_heads)
    stand_in = _StandIn(mixer, in_proj=SAME, out_proj=SAME, conv=convolution)
    mixed = run(stand_in, part.to_all_tokens(projected).transpose(2, 3).flatten(2))
    return mixer.out_proj(part.to_tokens(mixed[..., None], projected.shape[2]).squeeze(-1))


def _gated_delta_net(mixer: Any, hidden: torch.Tensor, part: RowPart, run: Run) -> torch.Tensor:
    """Run Qwen3.5's Gated DeltaNet: (1, own tokens, hidden) -> the same shape. A rank gets some key heads, and
    all value heads that share these key heads."""
    heads, values = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    key, value = mixer.head_k_dim, values * mixer.head_v_dim
    convolved = [heads * key, heads * key, heads * value]
    projected = [
        *mixer.in_proj_qkv(hidden).split(convolved, -1),
        *(layer(hidden) for layer in (mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)),
    ]
    by_head = [x.unflatten(-1, (heads, -1)) for x in projected]
    found = part.to_all_tokens(torch.cat(by_head, -1)).split([x.shape[-1] for x in by_head], -1)

    def own(of_heads: torch.Tensor) -> torch.Tensor:
        return part.own_heads(of_heads.unflatten(0, (heads, -1))).flatten(0, 1)

    own_heads = found[0].shape[2]
    ends = [*itertools.accumulate(own_heads * size for size in (2 * key + value, value, values, values))]
    # A projection of the stand-in only selects its columns of the exchanged projections.
    places = [itemgetter((..., slice(start, end))) for start, end in zip([0, *ends], ends, strict=False)]
    stand_in = _StandIn(
        mixer,
        num_k_heads=own_heads, num_v_heads=own_heads * values, key_dim=own_heads * key, value_dim=own_heads * value,
        in_proj_qkv=places[0], in_proj_z=places[1], in_proj_b=places[2], in_proj_a=places[3], out_proj=SAME,
        conv1d=_convolution(mixer.conv1d, lambda x: torch.cat([own(each) for each in x.split(convolved)])),
        A_log=own(mixer.A_log), dt_bias=own(mixer.dt_bias),
    )  # fmt: skip
    mixed = run(stand_in, torch.cat([x.flatten(2) for x in found], -1))
    return mixer.out_proj(part.to_tokens(mixed.unflatten(-1, (own_heads, -1)), heads).flatten(2))


def _mamba(mixer: Any, hidden: torch.Tensor, part: RowPart, run: Run) -> torch.Tensor:
    """Run Granite's Mamba-2: (1, own tokens, hidden) -> the same shape. The ranks exchange each head's inputs and time
    step, and B and C of the head's group. The gated norm spans all heads, so it runs last, on this rank's tokens."""
    heads, groups, size = mixer.num_heads, mixer.n_groups, mixer.ssm_state_size
    inner = heads * mixer.head_dim
    convolved = [inner, groups * size, groups * size]
    gate, inputs, steps = mixer.in_proj(hidden).split([inner, sum(convolved), heads], -1)
    shared = torch.arange(heads, device=hidden.device) // (heads // groups)  # Index of each head's group.

    def by_head(channels: torch.Tensor, axis: int) -> list[torch.Tensor]:
        own, *of_groups = channels.split(convolved, axis)
        each = [x.unflatten(axis, (groups, -1)).index_select(axis, shared) for x in of_groups]
        return [own.unflatten(axis, (heads, -1)), *each]

    exchanged = torch.cat([*by_head(inputs, 2), steps[..., None]], -1)
    *found, own_steps = part.to_all_tokens(exchanged).split([mixer.head_dim, size, size, 1], -1)
    own_heads = own_steps.shape[2]
    width, states = own_heads * mixer.head_dim, own_heads * size

    def own(channels: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.own_heads(x).flatten(0, 1) for x in by_head(channels, 0)])

    stand_in = _StandIn(
        mixer,
        num_heads=own_heads, n_groups=own_heads, intermediate_size=width, conv_dim=width + 2 * states,
        in_proj=SAME, norm=lambda scanned, gate: scanned, out_proj=SAME, conv1d=_convolution(mixer.conv1d, own),
        A_log=part.own_heads(mixer.A_log), dt_bias=part.own_heads(mixer.dt_bias), D=part.own_heads(mixer.D),
    )  # fmt: skip
    no_gate = exchanged.new_zeros(()).expand(1, found[0].shape[1], width)
    mixed = run(stand_in, torch.cat([no_gate, *(x.flatten(2) for x in found), own_steps.squeeze(-1)], -1))
    mixed = part.to_tokens(mixed.unflatten(-1, (own_heads, -1)), heads).flatten(2)
    return mixer.out_proj(mixer.norm(mixed, gate).to(hidden.dtype))


WAYS = {
    "Lfm2ShortConv": _short_convolution,
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_net,
    "GraniteMoeHybridMambaLayer": _mamba,
}


def way_of(mixer: torch.nn.Module) -> Callable[[Any, torch.Tensor, RowPart, Run], torch.Tensor] | None:
    """Return the function that runs a recurrent layer with its heads divided among ranks, or None for an unknown
    layer."""
    kinds = (kind.__name__ for kind in type(mixer).__mro__)
    return next((WAYS[name] for name in kinds if name in WAYS), None)

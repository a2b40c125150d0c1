"""Run a packed row as padded rows, one per sequence, and put the hidden states back into the packed order.

This serves models that mix tokens without transformers' attention interface (state-space layers, convolutions, custom
code). Padding is on the right, where a causal model doesn't look. A prompt goes through once per completion.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..batch import UNKNOWN, MicroBatch, SegmentLayout
from ..extensions.images import towers as images
from .sending import to_device_async

ROUTED = "routed_experts"  # argument of a layer with the experts of its tokens, see `router_replay`


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Sequences of a packed row, padded on the right: one for each segment that no other segment attends to.

    Example: the prompt p p p with completions a a and b b b b (see `SegmentLayout`):

        tokens = 0 1 2 3 4 0 0    lengths = 5    places = 0 1 2 3 4 10 11 12 13
                 0 1 2 5 6 7 8              7
    """

    tokens: torch.Tensor  # (B, L) int64, index of each token in the packed row; 0 for padding
    lengths: torch.Tensor  # (B,) int64, tokens of each sequence
    places: torch.Tensor  # (T,) int64, first index of each packed token in the flattened (B * L)
    chains: tuple[tuple[int, ...], ...] = ()  # [B] segments of each sequence


def rows_of(layout: SegmentLayout) -> PaddedRows:
    """Lay out a layout's sequences as padded rows."""
    starts = layout.starts
    ends = set(range(len(layout.lengths))) - {s for seen in layout.attends_to for s in seen}
    chains = [(*layout.attends_to[end], end) for end in sorted(ends)]
    rows = [torch.cat([torch.arange(starts[s], starts[s] + layout.lengths[s]) for s in chain]) for chain in chains]
    tokens = pad_sequence(rows, batch_first=True)
    places = torch.full((layout.num_tokens,), -1)
    for index, (chain, row) in enumerate(zip(chains, rows, strict=True)):
        for at, segment in enumerate(chain):
            assert layout.attends_to[segment] == chain[:at], f"segment {segment} sees another past in {chain}"
        new = places[row] < 0
        places[row[new]] = index * tokens.shape[1] + torch.arange(len(row))[new]
    return PaddedRows(tokens, torch.tensor([len(row) for row in rows]), places, tuple(chains))


def hidden_states(
    model: Any, decoder: torch.nn.Module, micro_batch: MicroBatch, routed: torch.Tensor | None = None, **asked: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute the decoder's last hidden states on padded rows, and return them in the packed row's order.

    Args:
        model: ``decoder`` with a head.
        routed: (T, L, K) experts to replay, in the packed row's order.

    Returns:
        Hidden states (1, T, hidden), and with the option ``output_router_logits`` the router's logits (T, E) of each
        layer with experts. A prompt's values come from its first completion's row.
    """
    rows, device = rows_of(micro_batch.layout), micro_batch.input_ids.device
    tokens, lengths = to_device_async(rows.tokens, device), to_device_async(rows.lengths, device)
    mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    places = to_device_async(rows.places, device)
    if images.embeds(model, micro_batch):
        ids = micro_batch.input_ids[0][tokens] * mask
        states = images.padded_hidden_states(model, micro_batch, ids, mask, rows.chains)
        return states.flatten(0, 1).index_select(0, places)[None], []
    inputs: dict[str, Any] = {
        "input_ids": micro_batch.input_ids[0][tokens] * mask,  # padding is token 0, which nothing attends to
        "attention_mask": mask.long(),
        "position_ids": torch.arange(tokens.shape[1], device=device).expand_as(tokens),
        "use_cache": False,
        "return_dict": True,
        **asked,
    }
    if routed is not None:
        asked[ROUTED] = routed[tokens].masked_fill(~mask[..., None, None], UNKNOWN).flatten(0, 1)
        inputs[ROUTED] = asked[ROUTED]
    kind: Any = type(decoder)
    accepted = _parameters(kind)
    output = decoder(**{name: value for name, value in inputs.items() if name in accepted or name in asked})
    hidden = output.last_hidden_state.flatten(0, 1).index_select(0, places)[None]
    routers = getattr(output, "router_logits", None) or ()
    return hidden, [logits.flatten(0, -2).index_select(0, places) for logits in routers]


@functools.cache
def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)

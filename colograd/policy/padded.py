"""A packed row through a model that can't run it: one padded row per sequence, its hidden states put back in place.

For tokens that mix by other ways than transformers' attention interface (state-space layers, convolutions, custom
code). Padding stands to the right, where a causal model doesn't look; a prompt goes through once per completion.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..batch import UNKNOWN, MicroBatch, SegmentLayout
from . import images
from .sending import to_device_async

ROUTED = "routed_experts"  # the argument of a layer that has its tokens' experts, see `replay`


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The sequences of a packed row, one per segment that no other one sees, padded to the right.

    Example: the prompt p p p with completions a a and b b b b (see `SegmentLayout`):

        tokens = 0 1 2 3 4 0 0    lengths = 5    places = 0 1 2 3 4 10 11 12 13
                 0 1 2 5 6 7 8              7
    """

    tokens: torch.Tensor  # (B, L) int64: where in the packed row each token lies; 0 for padding
    lengths: torch.Tensor  # (B,) int64
    places: torch.Tensor  # (T,) int64: where each token of the packed row lies first in the flattened (B * L)
    chains: tuple[tuple[int, ...], ...] = ()  # [B] the segments of each sequence


def rows_of(layout: SegmentLayout) -> PaddedRows:
    """How a layout's sequences lie in padded rows."""
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
    """The decoder's last hidden states (1, T, hidden) in the packed row's order, computed on padded rows; and of each
    layer with experts its router's logits (T, E), if ``asked`` has ``output_router_logits``.

    A prompt's are those of its first completion's row.

    Args:
        model: of which ``decoder`` is all but the head.
        routed: (T, L, K) experts to be replayed, in the packed row's order.
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
        "input_ids": micro_batch.input_ids[0][tokens] * mask,  # padding is token 0, seen by nobody
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

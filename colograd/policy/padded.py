"""Run a packed row as padded rows, one per sequence, and put the hidden states back into the packed order.

This serves models that mix tokens without transformers' attention interface (state-space layers, convolutions, custom
code). Padding is on the right, where a causal model doesn't look. A prompt goes through once per completion.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..batch import MicroBatch, SegmentLayout
from .sending import to_device_async


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


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """A packed row's sequences as padded rows on the device."""

    rows: PaddedRows
    tokens: torch.Tensor  # (B, L) int64, see `PaddedRows`
    mask: torch.Tensor  # (B, L) bool, False for padding
    places: torch.Tensor  # (T,) int64, see `PaddedRows`
    ids: torch.Tensor  # (B, L) int64; padding is token 0, which nothing attends to

    @classmethod
    def of(cls, batch: MicroBatch) -> PaddedInputs:
        rows, device = rows_of(batch.layout), batch.input_ids.device
        tokens, lengths = to_device_async(rows.tokens, device), to_device_async(rows.lengths, device)
        mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        return cls(rows, tokens, mask, to_device_async(rows.places, device), batch.input_ids[0][tokens] * mask)

    def of_tokens(self, values: torch.Tensor, padding: float) -> torch.Tensor:
        """Lay out values (T, ...) of the row's tokens, (B * L, ...)."""
        mask = self.mask.view(*self.mask.shape, *[1] * (values.dim() - 1))
        return values[self.tokens].masked_fill(~mask, padding).flatten(0, 1)

    def packed(self, states: torch.Tensor) -> torch.Tensor:
        """Put states (B, L, hidden) into the packed row's order, (1, T, hidden)."""
        return states.flatten(0, 1).index_select(0, self.places)[None]


def hidden_states(
    body: torch.nn.Module, batch: MicroBatch, more: dict[str, Any], of_layers: dict[str, list[torch.Tensor]]
) -> torch.Tensor:
    """Compute a model's last hidden states on padded rows, and return them in the packed row's order, (1, T, hidden).

    Args:
        more: further keyword arguments of ``body``.
        of_layers: outputs of ``body`` per layer, by name, e.g. router logits. Each list is filled with one tensor
            (T, ...) per layer. The tokens of a prompt have their values from the row of its first completion.
    """
    rows = PaddedInputs.of(batch)
    inputs: dict[str, Any] = {
        "input_ids": rows.ids,
        "attention_mask": rows.mask.long(),
        "position_ids": torch.arange(rows.ids.shape[1], device=rows.ids.device).expand_as(rows.ids),
        "use_cache": False,
        "return_dict": True,
        **more,
    }
    kind: Any = type(body)
    accepted = inspect.signature(kind.forward).parameters
    output = body(**{name: value for name, value in inputs.items() if name in accepted or name in more})
    for name, values in of_layers.items():
        layers = getattr(output, name, None) or ()
        values += [each.flatten(0, -2).index_select(0, rows.places) for each in layers]
    return rows.packed(output.last_hidden_state)

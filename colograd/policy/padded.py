"""Run a model on a packed row as padded rows, one per sequence, and return the hidden states in the packed row's order.

Models that mix tokens outside transformers' attention interface (state-space layers, convolutions, custom code) need
padded rows. Padding is on the right, where a causal model doesn't attend. Every completion has a copy of its prompt.
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
    """Indices that map a packed row to padded rows: one padded row per sequence (a completion with its prompt).

    Example: the prompt p p p with the completions a a and b b b b has B = 2 padded rows of L = 7 tokens:

        tokens = 0 1 2 3 4 0 0    lengths = 5    places = 0 1 2 3 4 10 11 12 13
                 0 1 2 5 6 7 8              7
    """

    tokens: torch.Tensor  # Index in the packed row of each padded token, (B, L) int64. Padding has 0.
    lengths: torch.Tensor  # Number of tokens of each sequence, (B,) int64.
    places: torch.Tensor  # Index in the flattened padded rows (B * L) of each packed token, (T,) int64: its first copy.
    chains: tuple[tuple[int, ...], ...] = ()  # Indices of the segments of each sequence, [B].


def rows_of(layout: SegmentLayout) -> PaddedRows:
    """Return the padded rows of a packed row's `SegmentLayout`: a row for each segment that no other attends to."""
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
    """Padded rows of a packed row as tensors on the device: B sequences of at most L tokens."""

    rows: PaddedRows  # The rows' indices, on the device.
    mask: torch.Tensor  # Attention mask, (B, L) bool, False for padding.
    ids: torch.Tensor  # Token ids, (B, L) int64. Padding has id 0.

    @classmethod
    def of(cls, batch: MicroBatch) -> PaddedInputs:
        host, device = rows_of(batch.layout), batch.input_ids.device
        tokens, lengths, places = (to_device_async(x, device) for x in (host.tokens, host.lengths, host.places))
        rows = PaddedRows(tokens, lengths, places, host.chains)
        mask = torch.arange(rows.tokens.shape[1], device=device) < rows.lengths[:, None]
        return cls(rows, mask, batch.input_ids[0][rows.tokens] * mask)

    def of_tokens(self, values: torch.Tensor, padding: float) -> torch.Tensor:
        """Convert values (T, ...) of a packed row's tokens to padded order, (B * L, ...), filled with ``padding``."""
        mask = self.mask.view(*self.mask.shape, *[1] * (values.dim() - 1))
        return values[self.rows.tokens].masked_fill(~mask, padding).flatten(0, 1)

    def packed(self, states: torch.Tensor) -> torch.Tensor:
        """Convert values (B, L, ...) of padded rows to the packed row's order, (1, T, ...)."""
        return states.flatten(0, 1).index_select(0, self.rows.places)[None]


def hidden_states(
    body: torch.nn.Module, batch: MicroBatch, more: dict[str, Any], of_layers: dict[str, list[torch.Tensor]]
) -> torch.Tensor:
    """Compute a model's last hidden states on padded rows, and return them in the packed row's order, (1, T, hidden).

    Args:
        body: the model without its head.
        more: additional keyword arguments of ``body``.
        of_layers: names of outputs of ``body`` that exist per layer, e.g. router logits, each with an empty list. The
            list is filled with a tensor (T, ...) per layer. A prompt's values come from its first completion's row.
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
    accepted = inspect.signature(type(body).forward).parameters
    output = body(**{name: value for name, value in inputs.items() if name in accepted or name in more})
    for name, values in of_layers.items():
        layers = getattr(output, name, None) or ()
        values += [each.flatten(0, -2).index_select(0, rows.rows.places) for each in layers]
    return rows.packed(output.last_hidden_state)

"""Run a model on a packed row as right-padded rows, one per sequence (a completion behind a copy of its prompt).

Padded rows are for models that can't take packed rows, e.g. because they don't use transformers' attention interface.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ..batch import MicroBatch, PackedRow, RolloutId, SegmentLayout
from ..riders import Media
from .sending import to_device_async


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Indices that map a packed row to padded rows.

    Example: the prompt p p p with the completions a a and b b b b has B = 2 padded rows of L = 7 tokens:

        tokens = 0 1 2 3 4 0 0    lengths = 5    places = 0 1 2 3 4 10 11 12 13
                 0 1 2 5 6 7 8              7
    """

    tokens: torch.Tensor  # (B, L) int64: each token's index in the packed row. Padding has 0.
    lengths: torch.Tensor  # (B,) int64: number of tokens of each padded row, without padding.
    places: torch.Tensor  # (T,) int64: index of each packed token's first copy in the flattened rows (B * L).
    chains: tuple[tuple[int, ...], ...] = ()  # For each of the B rows: indices of its segments.

    @property
    def mask(self) -> torch.Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def of_tokens(self, values: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """Convert values (T, ...) of a packed row's tokens to padded rows (B, L, ...), filled with ``padding``."""
        mask = self.mask.view(*self.tokens.shape, *[1] * (values.dim() - 1))
        return values[self.tokens].masked_fill(~mask, padding)

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """Convert values (B, L, ...) of padded rows to the packed row's order, (1, T, ...)."""
        return values.flatten(0, 1).index_select(0, self.places)[None]


def rows_of(layout: SegmentLayout, device: torch.device | None = None) -> PaddedRows:
    """Return the padded rows of a packed row: one for each segment that no other segment attends to."""
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
    lengths, device = torch.tensor([len(row) for row in rows]), device or places.device
    moved = [to_device_async(tensor, device) for tensor in (tokens, lengths, places)]
    return PaddedRows(moved[0], moved[1], moved[2], tuple(chains))


def hidden_states(
    body: torch.nn.Module, batch: MicroBatch, more: dict[str, Any], of_layers: dict[str, list[torch.Tensor]]
) -> torch.Tensor:
    """Run ``body`` on padded rows. Return the last hidden states in the packed row's order, (1, T, hidden).

    ``of_layers``: {name of an output field of ``body``: list}. All layers' tensors (T, ...) of the field are appended.
    """
    rows = rows_of(batch.layout, batch.input_ids.device)
    inputs: dict[str, Any] = {
        "input_ids": rows.of_tokens(batch.input_ids[0]),
        "attention_mask": rows.mask.long(),
        "position_ids": torch.arange(rows.tokens.shape[1], device=rows.tokens.device).expand_as(rows.tokens),
        "use_cache": False,
        "return_dict": True,
        **more,
    }
    accepted = inspect.signature(type(body).forward).parameters
    output = body(**{name: value for name, value in inputs.items() if name in accepted or name in more})
    for name, values in of_layers.items():
        values += [each.flatten(0, -2).index_select(0, rows.places) for each in getattr(output, name, None) or ()]
    return rows.packed(output.last_hidden_state)


def media_of(row: PackedRow) -> dict[int, tuple[Media, ...]] | None:
    """Return {segment index: images of this prompt or completion}, or None if the row has no images."""
    of_segments: list[tuple[Media, ...]] = []
    for part in row.parts:
        of_prompt = part.rollouts[0].input.media
        of_segments.append(() if of_prompt is None else (of_prompt,))
        of_segments += [rollout.all(Media) for rollout in part.rollouts]
    return {segment: media for segment, media in enumerate(of_segments) if media} or None


class PackedSequence(NamedTuple):
    """One completion of a packed row, with its prompt."""

    rollout: RolloutId
    prompt_ids: torch.Tensor  # Token ids of the prompt, (P,).
    completion_ids: torch.Tensor  # Token ids of the completion, (C,).
    place: slice  # The completion's range among the row's N labels.
    images: tuple[Any, ...] = ()  # Images of the prompt. Their token positions count from the prompt's start.
    answers: tuple[Any, ...] = ()  # Images in tools' answers. Their token positions count from the completion's start.


def sequences(row: MicroBatch) -> list[PackedSequence]:
    """Return a row's completions with their prompts. Each completion must be a single segment."""
    segments, found, at = row.input_ids[0].split(row.layout.lengths), list[PackedSequence](), 0
    ids, media = iter(row.rollouts), row.media or {}
    for index, (completion, context) in enumerate(zip(segments, row.layout.attends_to, strict=True)):
        if context:
            place, own = slice(at, at + len(completion)), (media.get(context[0], ()), media.get(index, ()))
            found.append(PackedSequence(next(ids), segments[context[0]], completion, place, *own))
            at += len(completion)
    return found

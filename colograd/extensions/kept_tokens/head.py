"""Truncated sampling in the forward: each label's distribution is over the tokens that the sampler had left."""

from __future__ import annotations

from typing import Any

import torch

from ...batch import KeptTokens
from ...config import GRPOConfig
from ...policy.logprobs import Compute, ForwardStep, Pass, install
from ...policy.sending import to_device_async


class Kept:
    """Candidate tokens of a head's N labels, indexed for tiles of the logits.

    Args:
        kept: candidate tokens of each label.
        first: token id of the head's first row, if ranks share out the vocabulary.
    """

    def __init__(self, kept: KeptTokens, device: torch.device, first: int = 0) -> None:
        counts = kept.counts.long()
        self.ends = [0, *counts.cumsum(0).tolist()]  # on the host: no tile waits for the device
        self.ids = to_device_async(kept.ids.long() - first, device)
        self.labels = to_device_async(torch.arange(len(counts)).repeat_interleave(counts), device)
        self.all = to_device_async(counts == 0, device)

    def hidden(self, row: slice, vocabulary: slice) -> torch.Tensor:
        """Return (n, c) bool, True where the token isn't among the label's candidates."""
        here = slice(self.ends[row.start], self.ends[row.stop])
        shape = row.stop - row.start, vocabulary.stop - vocabulary.start
        columns = self.ids[here] - vocabulary.start
        inside = (columns >= 0) & (columns < shape[1])
        places = ((self.labels[here] - row.start) * shape[1] + columns).where(inside, shape[0] * shape[1])
        found = torch.ones(shape[0] * shape[1] + 1, dtype=torch.bool, device=self.ids.device)
        found[places] = False  # the last entry takes the tokens of other tiles
        return found[:-1].view(shape) & ~self.all[row, None]


class KeptStep(ForwardStep):
    """Distributions over the kept tokens, for rows that have them."""

    of_rows = True

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        if row.batch.kept is not None:
            part = getattr(row.model.get_output_embeddings(), "vocabulary", None)
            first = 0 if part is None else part.start
            row.candidates = Kept(row.batch.kept, row.batch.input_ids.device, first)
        return inner(row)


def set_up(model: Any, config: GRPOConfig) -> None:
    """Install the step on a model of a run that truncates its sampling."""
    if config.replays_truncation:
        install(model, KeptStep())

"""Truncated sampling in the forward: each label's distribution is over the tokens that the sampler had left."""

from __future__ import annotations

from typing import Any

import torch

from ...config import GRPOConfig
from ...policy.logprobs import Compute, ForwardStep, Pass, install
from .rider import KeptTokens


class KeptStep(ForwardStep):
    """Distributions over the kept tokens, for rows that have them."""

    of_rows = True

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        if (kept := row.batch.get(KeptTokens)) is not None:
            part = getattr(row.model.get_output_embeddings(), "vocabulary", None)
            first = 0 if part is None else part.start
            row.candidates = kept.candidates(row.batch.input_ids.device, first)
        return inner(row)


def set_up(model: Any, config: GRPOConfig) -> None:
    """Install the step on a model of a run that truncates its sampling."""
    if config.replays_truncation:
        install(model, KeptStep())

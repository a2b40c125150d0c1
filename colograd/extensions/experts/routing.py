"""Routing statistics of a mixture of experts for one row: the spread of its tokens over experts, differentiable.

A prompt that a row holds once counts once per completion, as if each sequence had a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...batch import MicroBatch
from ...policy.attention import RowPart
from ...policy.layers import tells_routing as tells_routing
from ...policy.packing import NOBODY
from ...policy.sending import to_device_async


@dataclass(frozen=True, slots=True)
class Routing:
    """Sums over a row's tokens. L layers have E experts each."""

    tokens: torch.Tensor  # (), number of tokens of all sequences
    loads: torch.Tensor  # (L, E), number of tokens that each expert got
    probabilities: torch.Tensor  # (E,), sum of the routers' probabilities over tokens and layers; differentiable
    entropy: torch.Tensor  # (), sum of the routers' entropies over tokens and layers, nats

    @property
    def balance_loss(self) -> torch.Tensor:
        """Load-balancing loss: E times the sum over experts of (share of tokens) times (mean probability).

        All layers are pooled. An even spread with K experts per token gives K. Switch Transformer, arXiv 2101.03961,
        equations 4 to 6, as in transformers' `load_balancing_loss_func`. Differentiable in the probabilities.
        """
        rows = self._rows
        return self.loads.shape[1] * (self.loads.sum(0) / rows * self.probabilities / rows).sum()

    @property
    def largest_load(self) -> torch.Tensor:
        """Largest load of a layer's experts divided by their mean load, averaged over layers, (); 1: even."""
        loads = self.loads
        return (loads.amax(1) / loads.mean(1).clamp(min=torch.finfo(loads.dtype).tiny)).mean()

    @property
    def mean_entropy(self) -> torch.Tensor:
        """Mean entropy of a token in a layer, (), nats."""
        return self.entropy / self._rows

    @property
    def _rows(self) -> torch.Tensor:
        return (self.tokens * len(self.loads)).clamp(min=1)


def routing_of(
    router_logits: Sequence[torch.Tensor], chosen: int, micro_batch: MicroBatch, part: RowPart | None = None
) -> Routing:
    """Compute the statistics from each layer's ``router_logits`` (T, E) in the packed row's order.

    Args:
        chosen: number of experts per token.
        part: this rank's part of the row, if the logits are only of that part's tokens.
    """
    weights = token_weights(micro_batch)
    weights = weights if part is None else part.own_weights(weights)
    loads, probabilities, entropy = [], [], []
    for logits in router_logits:
        logprobs = logits.float().log_softmax(-1)
        of_experts = logprobs.exp()
        probabilities.append(weights @ of_experts)
        with torch.no_grad():
            picked = of_experts.topk(chosen, dim=-1).indices.flatten()
            loads.append(torch.zeros_like(of_experts[0]).index_add(0, picked, weights.repeat_interleave(chosen)))
            entropy.append(weights @ torch.special.entr(of_experts).sum(-1))
    sums = weights.sum(), torch.stack(loads), torch.stack(probabilities).sum(0), torch.stack(entropy).sum()
    return Routing(*(sums if part is None else map(part.sum, sums)))


def token_weights(micro_batch: MicroBatch) -> torch.Tensor:
    """Return (T,) float32, the number of the row's sequences that contain each token; 0 for dummies."""
    layout = micro_batch.layout
    counts = [0] * len(layout.lengths)
    within = {segment for seen in layout.attends_to for segment in seen}
    if any(identity.position != NOBODY for identity in micro_batch.rollouts):  # dummies are whole rows
        for end in set(range(len(counts))) - within:
            for segment in (*layout.attends_to[end], end):
                counts[segment] += 1
    weights = torch.tensor(counts, dtype=torch.float32).repeat_interleave(torch.tensor(layout.lengths))
    return to_device_async(weights, micro_batch.input_ids.device)

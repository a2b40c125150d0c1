"""Routing statistics of a mixture of experts for one packed row: how the row's tokens are spread over the experts.

A packed row contains a prompt once for G completions. The prompt's tokens count G times, as in G separate rows.
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
    """Routing statistics of a packed row, as sums over its tokens. L layers have E experts each."""

    tokens: torch.Tensor  # Number of tokens of all sequences, ().
    loads: torch.Tensor  # Number of tokens that each expert got, (L, E).
    probabilities: torch.Tensor  # Sum of the routers' probabilities over tokens and layers, (E,). Has a gradient.
    entropy: torch.Tensor  # Sum of the routers' entropies over tokens and layers in nats, ().

    @property
    def balance_loss(self) -> torch.Tensor:
        """Load-balancing loss: E times the sum over experts of (fraction of tokens) times (mean probability). All
        layers are pooled. An even spread with K experts per token gives K. From Switch Transformer, arXiv 2101.03961,
        equations 4 to 6, as in transformers' `load_balancing_loss_func`. Only the probabilities have a gradient."""
        rows = self._rows
        return self.loads.shape[1] * (self.loads.sum(0) / rows * self.probabilities / rows).sum()

    @property
    def largest_load(self) -> torch.Tensor:
        """Largest load of an expert in a layer divided by the mean load, averaged over layers, (). 1 means even."""
        loads = self.loads
        return (loads.amax(1) / loads.mean(1).clamp(min=torch.finfo(loads.dtype).tiny)).mean()

    @property
    def mean_entropy(self) -> torch.Tensor:
        """Mean entropy of a router's distribution over the experts of a layer, per token, in nats, ()."""
        return self.entropy / self._rows

    @property
    def _rows(self) -> torch.Tensor:
        return (self.tokens * len(self.loads)).clamp(min=1)


def routing_of(
    router_logits: Sequence[torch.Tensor], chosen: int, micro_batch: MicroBatch, part: RowPart | None = None
) -> Routing:
    """Compute a packed row's routing statistics from each layer's ``router_logits`` (T, E), in the row's token order.
    ``chosen`` is the number of experts per token. ``part`` is this rank's part of the row, if the logits are of this
    rank's tokens only (sequence parallelism)."""
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
    """Return for each token of a row the number of sequences that contain the token, (T,) float32. 0 in dummy rows."""
    layout = micro_batch.layout
    counts = [0] * len(layout.lengths)
    within = {segment for seen in layout.attends_to for segment in seen}
    if any(identity.position != NOBODY for identity in micro_batch.rollouts):  # A dummy row has no real rollout.
        for end in set(range(len(counts))) - within:
            for segment in (*layout.attends_to[end], end):
                counts[segment] += 1
    weights = torch.tensor(counts, dtype=torch.float32).repeat_interleave(torch.tensor(layout.lengths))
    return to_device_async(weights, micro_batch.input_ids.device)

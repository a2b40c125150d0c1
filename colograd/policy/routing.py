"""What the routers of a mixture of experts did with a row: how its tokens were spread, and the gradient of that.

A prompt that a row holds once counts once per completion: as if each sequence had a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import MicroBatch
from ..runtime.sizes import size_of
from .packing import NOBODY
from .sending import to_device_async
from .sequence_parallel import RowPart


@dataclass(frozen=True, slots=True)
class Routing:
    """Sums over a row's tokens. L layers have E experts each."""

    tokens: torch.Tensor  # () of all its sequences
    loads: torch.Tensor  # (L, E) how many of them each expert got
    probabilities: torch.Tensor  # (E,) the routers' probabilities, over the layers too; differentiable
    entropy: torch.Tensor  # () of their distributions, nats, likewise over the layers

    @property
    def balance_loss(self) -> torch.Tensor:
        """E times the sum over experts of each one's share of tokens times its mean probability, of all layers pooled:
        K for K experts per token and an even spread. Switch Transformer, arXiv 2101.03961, equations 4 to 6, as in
        transformers' `load_balancing_loss_func`. Differentiable by the probabilities."""
        rows = self._rows
        return self.loads.shape[1] * (self.loads.sum(0) / rows * self.probabilities / rows).sum()

    @property
    def largest_load(self) -> torch.Tensor:
        """() the largest load of a layer's experts by their mean load, averaged over layers; 1: even."""
        loads = self.loads
        return (loads.amax(1) / loads.mean(1).clamp(min=torch.finfo(loads.dtype).tiny)).mean()

    @property
    def mean_entropy(self) -> torch.Tensor:
        """() nats, of a token in a layer."""
        return self.entropy / self._rows

    @property
    def _rows(self) -> torch.Tensor:
        return (self.tokens * len(self.loads)).clamp(min=1)


def num_experts(model_config: Any) -> int:
    """Experts of a layer among which routers choose; 0: it is no mixture."""
    found = size_of(model_config, "num_experts", "num_local_experts", "n_routed_experts")
    return found if experts_per_token(model_config) or found > 1 else 0


def experts_per_token(model_config: Any) -> int:
    """0: the configuration doesn't say."""
    return size_of(model_config, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


def active_parameters(model: Any) -> int:
    """Parameters that a token goes through: of a mixture's experts as many as it is sent to."""
    total, experts = int(model.num_parameters()), num_experts(model.config)
    if not experts:
        return total
    idle = 1 - (experts_per_token(model.config) or experts) / experts
    return total - int(idle * sum(p.numel() for name, p in model.named_parameters() if ".experts." in name))


def tells_routing(model: Any) -> bool:
    """Whether the model can return what its routers said."""
    return hasattr(model.config.get_text_config(), "output_router_logits") and "router_logits" in (
        getattr(model, "_can_record_outputs", None) or {}
    )


def routing_of(
    router_logits: Sequence[torch.Tensor], chosen: int, micro_batch: MicroBatch, part: RowPart | None = None
) -> Routing:
    """From each layer's ``router_logits`` (T, E), in the packed row's order, with ``chosen`` experts per token; from
    those of this rank's ``part`` of the row's tokens, where ranks share them out."""
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
    """(T,) float32: of how many of the row's sequences each token is a part. Dummies are none."""
    layout = micro_batch.layout
    counts = [0] * len(layout.lengths)
    within = {segment for seen in layout.attends_to for segment in seen}
    if any(identity.position != NOBODY for identity in micro_batch.rollouts):  # dummies are whole rows
        for end in set(range(len(counts))) - within:
            for segment in (*layout.attends_to[end], end):
                counts[segment] += 1
    weights = torch.tensor(counts, dtype=torch.float32).repeat_interleave(torch.tensor(layout.lengths))
    return to_device_async(weights, micro_batch.input_ids.device)

"""A PeftModel's log-probabilities and gradients of some samples, in packed or padded rows."""

from __future__ import annotations

from typing import Any

import torch

from colograd.policy import lora, row_proof
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack, sequences


def doing_something(model: Any) -> Any:
    """The same model with an adapter whose B isn't zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in lora.adapted_layers(model):
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=generator) * 0.3)
            if layer.magnitude is not None:
                layer.magnitude.mul_(1.0 + 0.1 * torch.rand(layer.magnitude.shape, generator=generator))
    return model


def logprobs(model: Any, share_prompts: bool) -> torch.Tensor:
    """Of the samples' tokens, in the samples' order."""
    rows = pack(row_proof._samples(lora.unwrap(model)), 1000, False, torch.device("cpu"), share_prompts=share_prompts)
    values = {}
    for row in rows:
        found = policy_logprobs(model, row, 1.0)[0]
        values |= {part.rollout: found[part.place] for part in sequences(row)}
    in_order = sorted(values, key=lambda identity: (identity.position, identity.index))
    return torch.cat([values[identity] for identity in in_order])


def gradients(model: Any, share_prompts: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of the samples in their order, and the adapter's gradients of their sum."""
    model.zero_grad()
    found = logprobs(model, share_prompts)
    found.sum().backward()
    return found.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]

"""Log-probabilities and gradients of adapters in packed or padded rows, and counted publishes."""

from __future__ import annotations

from typing import Any

import torch

from colograd import GRPOTrainer
from colograd.policy import lora, row_proof
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack
from colograd.policy.padded import sequences


def doing_something(model: Any) -> Any:
    """Fill the adapter's B, which starts at zero, with random values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in lora.adapted_layers(model):
            layer.lora_b.copy_(torch.randn(layer.lora_b.shape, generator=generator) * 0.3)
            if layer.magnitude is not None:
                layer.magnitude.mul_(1.0 + 0.1 * torch.rand(layer.magnitude.shape, generator=generator))
    return model


def logprobs(model: Any, share_prompts: bool) -> torch.Tensor:
    """Return the log-probabilities of the samples' tokens, in the samples' order."""
    rows = pack(row_proof._samples(lora.unwrap(model)), 1000, False, torch.device("cpu"), share_prompts=share_prompts)
    values = {}
    for row in rows:
        found = policy_logprobs(model, row, 1.0)[0]
        values |= {part.rollout: found[part.place] for part in sequences(row)}
    in_order = sorted(values, key=lambda identity: (identity.position, identity.index))
    return torch.cat([values[identity] for identity in in_order])


def gradients(model: Any, share_prompts: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the samples' log-probabilities, and the adapter's gradients of their sum."""
    model.zero_grad()
    found = logprobs(model, share_prompts)
    found.sum().backward()
    return found.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]


def check_rows_agree(model: Any, packed: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Check that checkpointed rows and padded rows agree with the packed ones."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recomputed = gradients(model.train(), share_prompts=True)
    model.gradient_checkpointing_disable()
    model.set_attn_implementation("sdpa")
    padded = gradients(model, share_prompts=False)
    for other in (recomputed, padded):
        torch.testing.assert_close(packed[0], other[0], rtol=0, atol=2e-5)
        for ours, theirs in zip(packed[1], other[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


class Counting(GRPOTrainer):
    """Counts the bytes of each publish, and checks that the engine then has the policy's weights bit for bit."""

    def publish(self) -> None:
        if not hasattr(self, "moved"):
            self.moved: list[int] = []
            publish = self.weights.publish

            def counted(version: int) -> int:
                self.moved.append(publish(version))
                return self.moved[-1]

            self.weights.publish = counted
        super().publish()
        assert self.weights.differing() == []

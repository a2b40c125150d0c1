"""Packed forward -> float32 log-probability and entropy of each label, never the logits of a whole row.

Only the positions that predict a completion token reach the language-model head. The head is applied in chunks that are
recomputed in the backward pass, so memory doesn't grow with the vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from . import attention, padded
from .batch import MicroBatch, StepBatch

# Logits alive at once: 2**25 float32 values are 128 MiB (and their gradient as much again, in the backward).
CHUNK_ELEMENTS = 2**25


def policy_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy of its distribution, at ``temperature``.

    Returns:
        logprobs (N,) float32, nats, differentiable; entropy (N,) float32, nats, detached.
    """
    hidden = hidden_states(model, micro_batch)[0].index_select(0, micro_batch.predictors)
    head = model.get_output_embeddings()
    return label_logprobs(
        hidden, head.weight, getattr(head, "bias", None), micro_batch.labels, temperature, _logit_transform(model)
    )


@torch.no_grad()
def with_old_logprobs(model: torch.nn.Module, step: StepBatch, temperature: float) -> StepBatch:
    """The step with the log-probabilities of the present weights, for when these have moved on."""
    rows = tuple(
        dataclasses.replace(row, old_logprobs=policy_logprobs(model, row, temperature)[0]) for row in step.micro_batches
    )
    return dataclasses.replace(step, micro_batches=rows, first_of_round=False)


def hidden_states(model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """The decoder's last hidden states of a packed row, (1, T, hidden). A model with any other attention than the
    packed one runs its sequences padded."""
    if model.config._attn_implementation != attention.NAME:
        return padded.hidden_states(model.get_decoder(), micro_batch)
    output = model.get_decoder()(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        layout=micro_batch.layout,
        use_cache=False,
    )
    return output.last_hidden_state


def label_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: float,
    transform: dict[str, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`policy_logprobs` from hidden states (N, hidden) and the head's weight (V, hidden)."""
    if not len(labels):
        return hidden.sum().float() * torch.zeros(0, device=hidden.device), torch.zeros(0, device=hidden.device)
    size = max(16, CHUNK_ELEMENTS // weight.shape[0])
    logprobs, entropies = [], []
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        logprob, entropy = checkpoint(
            _chunk, hidden[part], weight, bias, labels[part], temperature, transform, use_reentrant=False
        )
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: float,
    transform: dict[str, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if transform["scale"] != 1.0:
        logits = logits * transform["scale"]
    if cap := transform["softcap"]:
        logits = torch.tanh(logits / cap) * cap
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(1, labels[:, None]).squeeze(1) - normaliser
    with torch.no_grad():  # H = log Z - E[logit]
        entropy = normaliser - torch.linalg.vecdot((logits - normaliser[:, None]).exp_(), logits)
    return logprobs, entropy


def _logit_transform(model: Any) -> dict[str, float]:
    """What some architectures do to logits after the head: Gemma's soft cap; Granite's, Cohere's, Falcon-H1's scale."""
    config = model.config.get_text_config()
    scale = 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= float(getattr(config, name, None) or 1.0)
    return {"scale": scale, "softcap": float(getattr(config, "final_logit_softcapping", None) or 0.0)}

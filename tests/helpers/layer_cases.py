"""Rows of several lengths, and the gradients of a model trained on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from colograd.batch import FinishReason, Group, MicroBatch, Rollout, ScoredGroup
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack

CPU = torch.device("cpu")


# Tokens of prompts and of their completions: rows of 1 to 3 groups, one of them as long as a layer is wide.
ROWS = (
    [[7, 3, 9, 4]],
    [[5, 4, 3], [3, 2, 5]],
    [[2, 2], [3, 3], [4, 4]],
    [[24, 20, 20]],
    [[20, 10], [3, 30, 1]],
    [[6, 58, 64]],
)


def make_rows(device: torch.device = CPU, lengths: Sequence[Sequence[Sequence[int]]] = ROWS) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(1, 128, (length,), generator=generator).tolist()

    made = []
    for groups in lengths:
        scored = []
        for place, (prompt, *completions) in enumerate(groups):
            asked = tuple(tokens(prompt))
            rollouts = tuple(
                Rollout(asked, tokens(n), torch.zeros(n), torch.ones(n).bool(), FinishReason.STOP, 0)
                for n in completions
            )
            scored.append(
                ScoredGroup(Group({}, rollouts, place), torch.zeros(len(rollouts), 1), torch.ones(len(rollouts)))
            )
        made += pack(scored, 10_000, False, device)
    return made


def trained(model: Any, row: MicroBatch) -> torch.Tensor:
    """Return log-probabilities, and the gradients of a weighted sum of them in one vector."""
    model.zero_grad()
    logprobs, _ = policy_logprobs(model, row, 0.7)
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    return torch.cat([logprobs.detach(), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])

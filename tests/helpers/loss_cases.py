"""Steps of random ragged completions, and an objective's result on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from colograd.batch import FinishReason, Group, LossOutput, MicroBatch, PackedRow, Rollout, ScoredGroup, StepBatch
from colograd.losses import entropy
from colograd.losses.correction import SamplerCorrection, known, log_ratio_of
from colograd.losses.objective import Objective
from colograd.losses.token_losses import LOSSES
from colograd.policy.packing import collate, plan_rows

LONGEST = 9
KNOBS = {
    "epsilon": 0.2, "epsilon_high": 0.28, "delta": None, "max_completion_length": LONGEST,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip


@dataclasses.dataclass
class Step:
    """Groups of one step. Tensors of shape (n,) are indexed by the number of the completion token."""

    groups: list[ScoredGroup]
    logprobs: torch.Tensor  # requires grad, like `entropies`
    entropies: torch.Tensor
    old: torch.Tensor  # log-probabilities by the weights that sampled
    reference: torch.Tensor
    num_loss_tokens: int

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.group.rollouts]

    @property
    def lengths(self) -> list[int]:
        return [len(rollout.completion_ids) for rollout in self.rollouts]

    @property
    def truncated(self) -> list[bool]:
        return [rollout.finish_reason is FinishReason.LENGTH for rollout in self.rollouts]

    @property
    def advantages(self) -> torch.Tensor:
        """[B], or one per token [n]."""
        return torch.cat([group.advantages for group in self.groups])

    def rows(self, budget: int, on_policy: bool) -> list[PackedRow]:
        return [
            dataclasses.replace(
                row,
                scores=({} if on_policy else {"old_logprobs": self.old[collate(row).labels]})
                | {"ref_logprobs": self.reference[collate(row).labels]},
            )
            for row in plan_rows(self.groups, budget, True, torch.device("cpu"))
        ]

    def micro_batch(self, on_policy: bool) -> MicroBatch:
        (row,) = self.rows(1000, on_policy)
        return collate(row)

    def batch(self, rows: Sequence[PackedRow]) -> StepBatch:
        return StepBatch(tuple(rows), self.num_loss_tokens, len(self.rollouts), {}, ())


def make_step(
    seed: int = 0, per_token: bool = False, dtype: torch.dtype = torch.float64, truncation: bool = True
) -> Step:
    """Make three groups of four ragged completions: with tools' tokens, tokens without probability, and truncation."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (3, 4), generator=generator).tolist()
    total = sum(map(sum, lengths))
    logprobs = -normal(total).abs() - 0.1
    old, reference = logprobs + 0.2 * normal(total), logprobs + 0.3 * normal(total)
    sampler = (old + 0.2 * normal(total)).float()  # as the engine gives them
    sampler[torch.rand(total, generator=generator) < 0.05] = float("nan")
    groups, start, loss_tokens = [], 0, 0
    for position, row in enumerate(lengths):
        rollouts = []
        for index, length in enumerate(row):
            truncated = truncation and (position, index) in ((0, 1), (2, 3))
            ids = tuple(range(start, start + length))
            sampled = torch.rand(length, generator=generator) < 0.8
            sampled[0] = True
            reason = FinishReason.LENGTH if truncated else FinishReason.STOP
            rollouts.append(Rollout((7,) * (position + 1), ids, sampler[list(ids)], sampled, reason, 0))
            loss_tokens += 0 if truncated else int(sampled.sum())
            start += length
        advantages = normal(sum(row) if per_token else len(row)).float()
        advantages[0] = 0.0
        groups.append(ScoredGroup(Group({}, tuple(rollouts), position), torch.zeros(4, 1), advantages))
    return Step(
        groups,
        logprobs.to(dtype).requires_grad_(),
        (normal(total).abs() + 0.01).to(dtype).requires_grad_(),
        old.to(dtype),
        reference.to(dtype),
        loss_tokens,
    )


def kl_term(beta: float, unbiased: bool = True) -> Any:
    """Return the KL term of the extension `reference`; skip the test if that extension is missing."""
    return pytest.importorskip("colograd.extensions.reference.loss").KLTerm(beta, unbiased)


def make_objective(loss_type: str, knobs: dict[str, Any] | None = None, **terms: Any) -> Objective:
    """Make an objective. ``knobs`` are the loss's, ``terms`` the objective's, or those of a KL term."""
    if beta := terms.pop("beta", 0.0):
        terms["terms"] = (kl_term(beta, terms.pop("unbiased_kl", True)),)
    terms.pop("unbiased_kl", None)
    values, cls = KNOBS | (knobs or {}), LOSSES[loss_type]
    return Objective(cls(**{name: values[name] for name in (f.name for f in dataclasses.fields(cls))}), **terms)


def correction_weights(
    mode: str, low: float | None, high: float | None, trainer: torch.Tensor, row: MicroBatch
) -> torch.Tensor:
    """Return the weights of a correction, from the trainer's log-probabilities (N,)."""
    difference = known(trainer - row.sampler_logprobs, row.loss_mask)
    return SamplerCorrection(mode, low, high).weights(log_ratio_of(difference, mode, row))


def our_loss(
    objective: Objective, step: Step, rows: Sequence[PackedRow], coefficient: float = 0.0
) -> tuple[torch.Tensor, list[LossOutput]]:
    """Sum the loss over micro-batches, divided by the step's denominator."""
    batch = step.batch(rows)
    batch = entropy.with_step_entropy(batch, objective, coefficient, lambda row: step.entropies[row.labels].detach())
    outputs = [
        objective(step.logprobs[row.labels], step.entropies[row.labels], row) for row in map(collate, batch.rows)
    ]
    return torch.stack([output.loss for output in outputs]).sum() / objective.loss.denominator(batch), outputs


def gradients(value: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of each leaf, with zeros for an unused leaf."""
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

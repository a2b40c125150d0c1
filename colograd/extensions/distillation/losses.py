"""Terms of the objective for on-policy distillation: a teacher's part of the advantage, or a KL divergence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...batch import MicroBatch
from ...config import GRPOConfig
from ...losses.objective import LossTerm
from ...losses.tokens import Means, Tokens
from ...policy.logprobs import ForwardStep
from .head import TeacherStep, TeacherTop
from .teacher import UNTAUGHT


@dataclass(frozen=True, slots=True)
class AdvantageTerm(LossTerm):
    """`distillation_kl: sampled`: the part of the advantages that comes from a teacher's log-probabilities."""

    weight: float

    needs = ("teacher_logprobs",)
    waits = "a teacher's term isn't trained early"

    def before(self, old: torch.Tensor, batch: MicroBatch) -> MicroBatch:
        """Add weight * (log p_teacher - log pi_old) to the advantages of tokens that a teacher scored.

        Averaged over tokens that the policy samples, this term is -weight * KL(policy || teacher) at the token's
        position (MiniLLM, arXiv 2306.08543, eq. 3, without the terms of later positions)."""
        gain = (batch.scores["teacher_logprobs"] - old).where(_taught(batch) > 0, 0.0)
        return dataclasses.replace(batch, advantages=batch.advantages + self.weight * gain)

    def observe(self, old: torch.Tensor, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> Means:
        taught, theirs = _taught(tokens.batch), tokens.batch.scores["teacher_logprobs"]
        return {"teacher_kl": ((old - theirs).where(taught > 0, 0.0).sum(), taught.sum())}


@dataclass(frozen=True, slots=True)
class DivergenceTerm(LossTerm):
    """`distillation_kl: exact` or `top_k`: weight times the reverse KL divergence, which `TeacherStep` computes."""

    weight: float
    needs: tuple[str]

    waits = AdvantageTerm.waits

    def steps(self, second_models: Mapping[str, Any]) -> tuple[ForwardStep, ...]:
        (field,) = self.needs
        return (TeacherStep(TeacherTop if field == "teacher_top" else second_models[field].head),)

    def of_tokens(self, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.weight * values["divergence"].where(tokens.batch.loss_mask > 0, 0.0)

    def observe(self, old: torch.Tensor, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> Means:
        mask = tokens.batch.loss_mask
        return {"teacher_kl": (values["divergence"].detach().where(mask > 0, 0.0).sum(), mask.sum())}


def _taught(batch: MicroBatch) -> torch.Tensor:
    """Return 1 for each token that is in the loss and scored by a teacher, else 0."""
    return batch.loss_mask * (batch.scores["teacher_logprobs"] != UNTAUGHT)


def teacher_term(config: GRPOConfig, policy: Any) -> LossTerm | None:
    if not config.distils or config.distillation_weight == 0:
        return None
    field = {"exact": "teacher_states", "top_k": "teacher_top"}.get(config.distillation_kl)
    weight = config.distillation_weight
    return DivergenceTerm(weight, (field,)) if field else AdvantageTerm(weight)

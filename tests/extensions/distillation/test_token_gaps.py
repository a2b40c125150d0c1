"""A teacher's term in the losses: an advantage per token."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from loss_cases import gradients

from colograd.batch import FinishReason, Group, MicroBatch, Rollout, ScoredGroup
from colograd.config import GRPOConfig
from colograd.losses.objective import Objective
from colograd.policy.packing import pack

CPU = torch.device("cpu")


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", report_to="none", vllm_importance_sampling_correction=False, **settings)


def one_completion(advantages: list[float]) -> MicroBatch:
    """A completion whose token labels are the tokens' indices."""
    many = len(advantages)
    rollout = Rollout((9,), range(many), torch.zeros(many), torch.ones(many).bool(), FinishReason.STOP, 0)
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.tensor(advantages))
    return pack([group], 100, True, CPU)[0]


@pytest.mark.parametrize(
    "settings", [{"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"loss_type": "gmpo"}]
)
def test_each_token_learns_its_own_gap(settings: dict[str, Any]) -> None:
    """A teacher's term is an advantage per token. On-policy its gradient is each token's gap, by the length."""
    teacher = {"teacher_model_name_or_path": "some", "distillation_weight": 0.5}
    run = config(**teacher, **settings)
    objective = Objective.from_config(run).with_terms(run, None)
    own, gaps = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.tensor([-1.0, 0.0, 2.0])
    row = dataclasses.replace(one_completion([0.0] * 3), scores={"teacher_logprobs": own.detach() + gaps})
    loss = objective(own, torch.zeros(3), row).loss
    torch.testing.assert_close(gradients(loss, own)[0], -0.5 * gaps / 3)

"""A mixture's routers: the load-balancing loss against TRL's own way of asking for it, whatever the rows."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers as hf
import trl_oracle
from row_cases import PACKED, SHAPE, make, make_groups

from colograd.batch import LossOutput, StepBatch, StepConstants
from colograd.extensions.experts.losses import BalanceTerm, RoutingStep, statistics, token_weights
from colograd.losses.entropy import with_step_entropy
from colograd.losses.objective import Objective
from colograd.policy.layers import tells_routing
from colograd.policy.logprobs import PolicyForward
from colograd.policy.packing import collate, dummy, plan_rows
from colograd.policy.row_proof import choose_rows
from colograd.runtime.sizes import active_parameters

ROUTED = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
FAMILIES = {
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SHAPE, **ROUTED, head_dim=16, num_experts=4, moe_intermediate_size=32)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, **ROUTED, num_local_experts=4)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SHAPE, **ROUTED, head_dim=16, num_local_experts=4, sliding_window=32)
    ),
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**SHAPE, **ROUTED, num_experts=4)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **SHAPE, **ROUTED, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48
        )
    ),
}
CPU = torch.device("cpu")


def outputs(model: Any, budget: int, share_prompts: bool, coefficient: float) -> tuple[torch.Tensor, list[LossOutput]]:
    """Return the step's loss, divided as in the trainer, and the objective's output for each micro-batch."""
    groups = make_groups()
    rows = plan_rows(groups, budget, False, CPU, share_prompts)
    plain = Objective.from_config(tiny.config("unused", vllm_importance_sampling_correction=False))
    routed = tells_routing(model)
    objective = dataclasses.replace(plain, terms=(BalanceTerm(coefficient),) if routed else ())
    forward = PolicyForward(model, 1.0, steps=(RoutingStep(),) if routed else ())
    completions = [rollout for group in groups for rollout in group.group.rollouts]
    tokens = sum(len(rollout.completion_ids) for rollout in completions)
    step = StepBatch((*rows, dummy(CPU)), tokens, len(completions), {}, tuple(groups))
    step = with_step_entropy(step, objective, 0.0, lambda row: row.labels)
    found = []
    for row in map(collate, step.rows):
        logprobs, entropy, values = forward(row)
        found.append(objective(logprobs, entropy, row, values))
    return sum((output.loss for output in found), torch.zeros(())) / objective.loss.denominator(step), found


def padded_batch() -> dict[str, torch.Tensor]:
    """Each completion with its prompt, padded to the left and to the right, as TRL has them."""
    groups = make_groups()
    pairs = [(r.prompt_ids, list(r.completion_ids)) for group in groups for r in group.group.rollouts]
    left, right = (max(len(part) for part in parts) for parts in zip(*pairs, strict=True))
    return {
        "prompt_ids": torch.tensor([[0] * (left - len(prompt)) + [*prompt] for prompt, _ in pairs]),
        "prompt_mask": torch.tensor([[0] * (left - len(prompt)) + [1] * len(prompt) for prompt, _ in pairs]),
        "completion_ids": torch.tensor([completion + [0] * (right - len(completion)) for _, completion in pairs]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (right - len(c)) for _, c in pairs]),
        "advantages": torch.cat([group.advantages for group in groups]),
        "num_items_in_batch": torch.tensor(float(sum(len(completion) for _, completion in pairs))),
    }


def trl_loss(model: Any, coefficient: float) -> tuple[torch.Tensor, float]:
    """Loss of TRL's trainer on these rows, and its metric ``aux_loss`` (0 without). TRL patches the model's head; this
    fake returns the same values from the unpatched model."""

    def fused(input_ids: torch.Tensor, labels: torch.Tensor, fused_lm_head: bool, **kwargs: Any) -> SimpleNamespace:
        output = model(input_ids=input_ids, **kwargs)
        logprobs = output.logits[:, :-1].log_softmax(-1)
        of_labels = logprobs.gather(2, labels[:, 1:, None].clamp(min=0)).squeeze(2)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return SimpleNamespace(log_probs=of_labels, entropy=entropy, aux_loss=getattr(output, "aux_loss", None))

    trainer = trl_oracle.bare_trainer(vllm_importance_sampling_correction=False, max_completion_length=64)
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = coefficient != 0, coefficient
    trainer.accelerator.gather_for_metrics = lambda tensor: tensor
    trainer.accelerator.is_main_process = True
    trainer.accelerator.autocast = contextlib.nullcontext
    loss = trainer._compute_loss(fused, padded_batch())
    return loss, trl_oracle.metrics_of(trainer).get("aux_loss", 0.0)


@pytest.mark.parametrize("family", [*FAMILIES, "glm4_moe"])
def test_the_loss_is_trls_on_the_same_rows(family: str, tried: Any) -> None:
    """TRL's own code: the whole loss, the load-balancing loss in it, and every gradient; packed and padded. GLM-4-MoE
    has no such loss in transformers, nor has its trainer."""
    pytest.importorskip("trl")
    model = make(FAMILIES[family] if family in FAMILIES else PACKED[family]).eval()
    coefficient = 0.5 if family in FAMILIES else 0.0
    choose_rows(model)
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    expected, balance = trl_loss(model, coefficient)
    without, nothing = trl_loss(model, 0.0)
    assert (balance > 1) == bool(coefficient) and not nothing
    assert float((expected - without).detach()) == pytest.approx(coefficient * balance, rel=1e-4)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.set_attn_implementation(ours)
    for share_prompts in (True, False):
        model.zero_grad()
        loss, found = outputs(model, 10_000, share_prompts, coefficient)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        if coefficient:
            total, count = found[0].sums["aux_loss"]
            assert float(total / count) == pytest.approx(balance, rel=1e-5)
        else:
            assert "aux_loss" not in found[0].sums
        for name, gradient in wanted.items():
            error = (model.get_parameter(name).grad - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert float(error) < 1e-4, name
    balancing = "" if coefficient else "; it has no load-balancing loss"
    tried(family, trl=f"loss and gradients{balancing}")


def test_it_is_a_mean_over_the_micro_batches_by_their_tokens() -> None:
    """As in TRL, each micro-batch multiplies shares and probabilities, so its size changes the loss slightly."""
    model = make(FAMILIES["qwen3_moe"]).eval()
    choose_rows(model)
    with torch.no_grad():
        whole, (one, nothing) = outputs(model, 10_000, True, 0.5)
        cut, several = outputs(model, 40, True, 0.5)
        plain, _ = outputs(model, 40, True, 0.0)
    assert len(several) == 3 and float(nothing.sums["aux_loss"][1]) == 0.0, "a dummy counts in nothing"
    sums = [torch.stack([torch.as_tensor(part) for part in output.sums["aux_loss"]]) for output in several]
    total, tokens = torch.stack(sums).sum(0)
    assert float(tokens) == float(one.sums["aux_loss"][1])
    torch.testing.assert_close(cut - plain, 0.5 * total / tokens, rtol=1e-4, atol=1e-5)
    assert float(abs(whole - cut)) < 0.05


def test_tokens_count_by_the_sequences_that_they_are_a_part_of() -> None:
    (row,) = plan_rows(make_groups()[:1], 10_000, False, CPU)
    batch = collate(row)
    lengths = batch.layout.lengths
    expected = [float(len(lengths) - 1)] * lengths[0] + [1.0] * sum(lengths[1:])
    assert token_weights(batch).tolist() == expected and sum(expected) == row.sequence_tokens


def test_a_token_goes_through_the_experts_that_it_is_sent_to() -> None:
    model, expert = make(FAMILIES["mixtral"]), 3 * 64 * 96
    assert active_parameters(model) == model.num_parameters() - 2 * 2 * expert, "of 4 experts in 2 layers 2"
    dense = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))
    assert active_parameters(dense) == dense.num_parameters()


def test_an_even_spread_is_the_least_and_a_single_expert_the_most() -> None:
    tokens = torch.tensor(8.0)
    even = statistics(tokens, torch.full((2, 4), 2.0), torch.full((4,), 4.0), torch.tensor(16 * 1.38629))
    one = statistics(tokens, torch.tensor([[8.0, 0, 0, 0]] * 2), torch.tensor([16.0, 0, 0, 0]), torch.tensor(0.0))
    names = ("routing/balance_loss", "routing/largest_load")
    assert [float(even[name]) for name in names] == [1.0, 1.0]
    assert [float(one[name]) for name in (*names, "routing/entropy")] == [4.0, 4.0, 0.0]
    assert float(even["routing/entropy"]) == pytest.approx(1.38629)
    assert StepConstants().sequence_tokens is None

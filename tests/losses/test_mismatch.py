"""Reports of the difference between sampler's and trainer's probabilities: metrics, an estimate, a line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tiny
import torch
from loss_cases import correction_weights, make_objective, make_step, our_loss

from colograd.config import GRPOConfig
from colograd.losses.correction import (
    DIFFERENCE,
    MASKED,
    MASKED_TOKENS,
    RAW,
    TRUNCATED,
    SamplerCorrection,
    finish_mismatch,
)
from colograd.policy.logprobs import FLOAT32_PRODUCTS
from colograd.policy.packing import collate
from colograd.reporting.metrics import Metrics


def config(**given: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", report_to="none", **given)


def logged(mode: str, budget: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Return a step's metrics, and the known log-ratios of the loss tokens of each completion that has any."""
    step = make_step(3)
    correction = SamplerCorrection(mode, 0.6, 2.0) if mode else None
    _, outputs = our_loss(make_objective("dapo", correction=correction), step, step.rows(budget, on_policy=False))
    metrics = Metrics()
    for output in outputs:
        metrics.update(output.sums, output.minima, output.maxima)
    reduced = metrics.reduce()
    finish_mismatch(reduced)
    of_completions: dict[int, torch.Tensor] = {}
    row = collate(*step.rows(1000, on_policy=False))
    difference = (row.old_logprobs - row.sampler_logprobs).nan_to_num(nan=0.0)
    for index in row.sequence.unique().tolist():
        counted = difference[(row.sequence == index) & (row.loss_mask > 0)]
        if len(counted):
            of_completions[index] = counted
    return reduced, list(of_completions.values())


def test_a_geometric_mask_weighs_by_the_mean() -> None:
    """Means of 0.01 and 0.3 nats, so ratios of 1.010 and 1.350; a mask of the products would drop both."""
    row = collate(*make_step(3).rows(1000, on_policy=False))
    places = [(row.sequence == index).nonzero().flatten() for index in (0, 1)]
    differences = torch.zeros_like(row.sampler_logprobs)
    differences[places[0][:4]] = torch.tensor([0.02, -0.01, 0.03, 0.0])[: len(places[0])]
    differences[places[1]] = 0.3
    mask = torch.zeros_like(row.loss_mask)
    mask[places[0][:4]] = mask[places[1]] = 1.0
    row = dataclasses.replace(row, loss_mask=mask, sampler_logprobs=torch.zeros_like(differences))
    weights = correction_weights("geometric_mask", 0.99, 1.02, differences, row)
    assert weights[places[0][:4]].tolist() == [1.0] * 4 and not weights[places[1]].any()
    products = correction_weights("sequence_mask", 0.99, 1.02, differences, row)
    assert not products[places[0][:4]].any()


def test_geometric_mask_defaults_to_the_reciprocal() -> None:
    """Means of -0.02 and -0.005 nats, so ratios of 0.980 and 0.995; 1 / 1.01 is 0.990, the bound of verl."""
    row = collate(*make_step(3).rows(1000, on_policy=False))
    row = dataclasses.replace(
        row, loss_mask=torch.ones_like(row.loss_mask), sampler_logprobs=torch.zeros_like(row.sampler_logprobs)
    )
    trainer = torch.where(row.sequence == 0, -0.02, -0.005)
    weights = correction_weights("geometric_mask", None, 1.01, trainer, row)
    assert weights.tolist() == (row.sequence != 0).float().tolist()
    assert correction_weights("sequence_mask", None, 1.01, trainer, row).all()


@pytest.mark.parametrize(
    "mode", ["", "token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "geometric_mask"]
)
@pytest.mark.parametrize("budget", [1000, 12])
def test_ratios_are_logged_as_they_are_before_the_correction(mode: str, budget: int) -> None:
    reduced, differences = logged(mode, budget)
    tokens = torch.cat(differences)
    level = mode.partition("_")[0]
    of_level = {"sequence": [d.sum() for d in differences], "geometric": [d.mean() for d in differences]}
    ratios = (torch.stack(of_level[level]) if level in of_level else tokens).exp()
    found = {name: reduced[f"{RAW}/{name}"] for name in ("mean", "std", "min", "max")}
    wanted = (ratios.mean(), ratios.std(correction=0), ratios.min(), ratios.max())
    assert found == pytest.approx(dict(zip(found, map(float, wanted), strict=True)), rel=1e-4)
    assert reduced[f"{DIFFERENCE}/std"] == pytest.approx(float(tokens.std(correction=0)), rel=1e-4)
    share = float(((ratios < 0.6) | (ratios > 2.0)).double().mean())
    assert reduced.get(MASKED) == (pytest.approx(share) if mode.endswith("mask") else None)
    assert reduced.get(TRUNCATED) == (pytest.approx(share) if mode.endswith("truncate") else None)
    away = sum(len(d) for d, ratio in zip(differences, ratios, strict=False) if not 0.6 <= ratio <= 2.0)
    masks_whole = mode in ("sequence_mask", "geometric_mask")
    assert reduced.get(MASKED_TOKENS) == (pytest.approx(away / len(tokens)) if masks_whole else None)
    assert not [name for name in reduced if name.endswith(("/signed", "/square"))]
    if mode.endswith("mask"):
        weights = torch.ones_like(ratios) if level == "geometric" else ratios
        kept = weights.where((ratios >= 0.6) & (ratios <= 2.0), 0.0)
        assert reduced["sampling/importance_sampling_ratio/mean"] == pytest.approx(float(kept.mean()), rel=1e-4)


@pytest.mark.engine
def test_a_float32_head_is_the_policys_the_references_and_the_engines(tiny_model, tmp_path, closing) -> None:
    from colograd import GRPOTrainer

    args = tiny.config(
        tmp_path,
        model_init_kwargs={"dtype": "bfloat16"},
        cast_lm_head_to_fp32=True,
        vllm_engine_kwargs={"hf_overrides": {"rope_theta": 10_000.0}},
        beta=0.1,
        max_steps=1,
    )
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, args, tiny.prompts()))
    heads = [model.get_output_embeddings() for model in (trainer.model, trainer.ref_model)]
    assert all(getattr(head, FLOAT32_PRODUCTS) and head.weight.dtype == torch.bfloat16 for head in heads)
    assert (trainer.engine.head_dtype, trainer.engine.dtype) == (torch.float32, torch.bfloat16)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert 0 < entry[f"{DIFFERENCE}/mean"] < 0.02 and entry[f"{DIFFERENCE}/std"] > 0
    assert 0.9 < entry[f"{RAW}/mean"] < 1.1 and entry[MASKED] == 0

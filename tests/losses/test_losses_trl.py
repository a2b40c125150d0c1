"""Every objective that TRL accepts, against TRL itself: the same tensors give the same loss, gradient and metrics.

The log-probabilities and entropies are tables with an entry per completion token of the step. TRL gets them as padded
batches, ours through `pack`, which must find each token's entry. So value and gradients say that formulas, masks and
packing agree. TRL's side is the installed package's own methods, sampler correction included (see `trl_oracle`).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trl_oracle
from loss_cases import KNOBS, Step, gradients, make_objective, make_step, our_loss

from colograd.batch import PackedRow
from colograd.config import objective as objective_knobs
from colograd.losses.correction import DIFFERENCE, MASKED, MASKED_TOKENS, RAW, SIGNED, SQUARE, TRUNCATED
from colograd.losses.entropy import EntropyController
from colograd.losses.objective import Objective, SamplerCorrection
from colograd.losses.token_losses import LOSSES
from colograd.reporting.metrics import Metrics

pytest.importorskip("trl")

OF_TRL = [name for name in LOSSES if name not in ("gmpo", "dppo")]
CLIPPED = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo")
LEVELS = ("token", "sequence")
# mode, lower and upper bound
CORRECTIONS: list[tuple[str, float | None, float | None] | None] = [
    None, ("token_truncate", 0.8, 1.2), ("token_mask", 0.7, 1.2), ("sequence_truncate", 0.7, 1.3),
    ("sequence_mask", 0.6, 2.0),
]  # fmt: skip
OF_TRL_TOO = [mode for mode in objective_knobs.CORRECTIONS if mode != "geometric_mask"]
ONE_BOUND = [(mode, *bounds) for mode in OF_TRL_TOO for bounds in ((0.8, None), (None, 1.2))]
NO_BOUND = [(mode, None, None) for mode in ("token_mask", "sequence_mask")]
KL = ((0.0, False), (0.4, False), (0.4, True))  # beta, use_bias_correction_kl
BONUS = ("none", "fixed", "adaptive")
QUANTILE = (1.0, 0.6)
OFF_POLICY = (None, 0.05)
DELTA = (None, 1.4)
# Kinds of tensors: dtype, on-policy, advantages per token.
TENSORS = [
    (dtype, on_policy, per_token)
    for per_token in (False, True)
    for dtype in (torch.float64, torch.float32)
    for on_policy in (False, True)
]


def accepted(loss_type: str, correction: Any) -> bool:
    """Whether `trl.GRPOTrainer` accepts the correction: VESPO refuses corrections of whole sequences."""
    return not (loss_type == "vespo" and correction is not None and correction[0].startswith("sequence"))


def combinations(loss_type: str) -> Iterator[tuple[Any, ...]]:
    deltas = DELTA if loss_type in CLIPPED else (None,)
    for combination in itertools.product(LEVELS, CORRECTIONS, KL, BONUS, QUANTILE, OFF_POLICY, deltas):
        if accepted(loss_type, combination[1]):
            yield combination


@functools.cache
def case(dtype: torch.dtype, per_token: bool, truncation: bool = True) -> Step:
    return make_step(3 + per_token, per_token, dtype, truncation)


@functools.cache
def whole_row(dtype: torch.dtype, on_policy: bool, per_token: bool) -> PackedRow:
    (row,) = case(dtype, per_token).rows(1000, on_policy)
    return row


def padded(step: Step, values: torch.Tensor) -> torch.Tensor:
    """(n,) -> (B, T), padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(step.lengths)), batch_first=True)


@functools.cache
def trl_inputs(
    dtype: torch.dtype, on_policy: bool, per_token: bool, correction: Any, beta: bool, truncation: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return TRL's inputs of its loss for this step, and TRL's metrics of this stage."""
    step = case(dtype, per_token, truncation)
    mode, low, high = correction or ("token_mask", None, None)
    trainer = trl_oracle.bare_trainer(
        num_iterations=1 if on_policy else 2,
        mask_truncated_completions=True,
        vllm_importance_sampling_correction=correction is not None,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        num_generations=4,
        beta=float(beta),
    )
    inputs = trl_oracle.loss_inputs(
        trainer,
        step.lengths,
        step.truncated,
        [rollout.sampled.int().tolist() for rollout in step.rollouts],
        [[None if x != x else x for x in rollout.sampler_logprobs.tolist()] for rollout in step.rollouts],
        padded(step, step.logprobs.detach() if on_policy else step.old),
        padded(step, step.reference),
    )
    advantages = step.advantages
    return inputs | {"advantages": padded(step, advantages) if per_token else advantages}, trl_oracle.metrics_of(
        trainer
    )


def trl_trainer(loss_type: str, level: str, correction: Any, kl: Any, bonus: str, quantile: float, off_policy: Any,
                delta: float | None) -> Any:  # fmt: skip
    trainer = trl_oracle.bare_trainer(
        **KNOBS | {"delta": delta},
        loss_type=loss_type,
        importance_sampling_level=level,
        vllm_importance_sampling_correction=correction is not None,
        beta=kl[0],
        use_bias_correction_kl=kl[1],
        entropy_coef=0.0 if bonus == "none" else 0.3,
        use_adaptive_entropy=bonus == "adaptive",
        entropy_target=1.0,
        top_entropy_quantile=quantile,
        off_policy_mask_threshold=off_policy,
    )
    trainer._last_world_entropy = 0.5  # of an adaptive one: the step before was below the target
    return trainer


def objective_of(loss_type: str, level: str, correction: Any, kl: Any, bonus: str, quantile: float, off_policy: Any,
                 delta: float | None) -> Objective:  # fmt: skip
    return make_objective(
        loss_type,
        {"delta": delta},
        level=level,
        correction=None if correction is None else SamplerCorrection(*correction),
        off_policy_threshold=off_policy,
        top_entropy_quantile=quantile,
        beta=kl[0],
        unbiased_kl=kl[1],
        entropy_bonus=bonus != "none",
    )


def token_form(inputs: dict[str, torch.Tensor], logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Change the inputs so that TRL's token level becomes GSPO-token (arXiv 2507.18071, eq. 14): a token's ratio has
    the value of its completion's ratio, and its own gradient."""
    mask, old = inputs["completion_mask"] * inputs["tool_mask"], inputs.get("old_per_token_logps", logprobs.detach())
    mean = ((logprobs.detach() - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return inputs | {"old_per_token_logps": logprobs.detach() - mean}


def assert_equal(loss_type: str, combination: tuple[Any, ...], tensors: tuple[torch.dtype, bool, bool]) -> None:
    """Loss and gradients to 1e-5.

    With one ratio per completion the expected values are GSPO-token's. TRL's own `sequence` has the same loss, and
    where a completion's tokens weigh alike the same gradient. Its KL term then has the completion's ratio, ours the
    token's: the two are compared on-policy.
    """
    dtype, on_policy, per_token = tensors
    level, correction, kl, bonus, quantile, *_ = combination
    step = case(dtype, per_token)
    inputs, _ = trl_inputs(dtype, on_policy, per_token, correction, kl[0] != 0)
    ours, _ = our_loss(
        objective_of(loss_type, *combination),
        step,
        [whole_row(dtype, on_policy, per_token)],
        0.3 if bonus != "none" else 0.0,
    )
    found = [ours.detach(), *gradients(ours, step.logprobs, step.entropies)]
    places = padded(step, torch.ones_like(step.old)).bool()
    names = ("loss", "gradient", "gradient of the entropies")
    by_completion = not per_token and quantile == 1 and (correction is None or correction[0].startswith("sequence"))
    compared = {level: names if level == "token" or (by_completion and not kl[1]) else names[:1]}
    if level == "sequence":
        compared["token"] = names
    for at, which in compared.items():
        logprobs, entropies = (padded(step, t.detach()).requires_grad_() for t in (step.logprobs, step.entropies))
        as_tokens = level == "sequence" and at == "token" and loss_type != "vespo"  # VESPO has no level
        given = token_form(inputs, logprobs) if as_tokens else inputs
        theirs = trl_oracle.loss_of(trl_trainer(loss_type, at, *combination[1:]), given, logprobs, entropies)
        expected = [theirs.detach(), *(g[places] for g in gradients(theirs, logprobs, entropies))]
        for name, a, b in zip(which, found, expected, strict=False):
            # The loss is a mean of terms of size 1 that cancel.
            allowed = 1e-5 * (b.norm() if name != "loss" else b.abs().clamp(min=0.1))
            assert (a - b).norm() <= allowed, (loss_type, combination, tensors, at, name, a, b)


def comparable(combination: tuple[Any, ...], tensors: tuple[torch.dtype, bool, bool]) -> bool:
    """Whether the KL term uses the same ratio in TRL and ours."""
    level, _, kl, *_ = combination
    return level == "token" or not kl[1] or tensors[1]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", OF_TRL)
def test_loss_and_gradient_equal_trl_s_in_every_combination(
    loss_type: str, each: int, capsys: pytest.CaptureFixture
) -> None:
    """All combinations of level, correction, KL, entropy bonus, quantile, off-policy mask and delta, or each seventh.
    The tensors are drawn for each combination: dtype, on-policy or with old log-probabilities, advantages per
    completion or per token."""
    draw = random.Random(loss_type)
    all_of_them = list(combinations(loss_type))[::each]
    for combination in all_of_them:
        assert_equal(loss_type, combination, draw.choice([t for t in TENSORS if comparable(combination, t)]))
    with capsys.disabled():
        print(f" [{loss_type}: {len(all_of_them)} combinations]", end="")


@pytest.mark.parametrize("loss_type", OF_TRL)
def test_any_two_values_meet_in_each_seventh_combination(loss_type: str) -> None:
    all_of_them = list(combinations(loss_type))
    for two in itertools.combinations(range(len(all_of_them[0])), 2):
        pairs, met = ({tuple(one[i] for i in two) for one in some} for some in (all_of_them, all_of_them[::7]))
        assert met == pairs, two


@pytest.mark.parametrize("correction", ONE_BOUND + NO_BOUND, ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_a_correction_may_have_one_bound(loss_type: str, correction: Any) -> None:
    for level, tensors in itertools.product(LEVELS, TENSORS):
        if accepted(loss_type, correction):
            assert_equal(loss_type, (level, correction, KL[0], "none", 1.0, None, None), tensors)


def test_the_top_token_alone_can_be_trained_on() -> None:
    """A quantile of 0, and several others: the threshold lies on a token or between two."""
    for quantile, tensors in itertools.product((0.0, 0.2, 0.5, 0.95), TENSORS):
        assert_equal("dapo", ("token", None, KL[1], "fixed", quantile, None, None), tensors)


@pytest.mark.parametrize("tensors", [tensors for tensors in TENSORS if not tensors[2]], ids=str)
def test_the_geometric_mean_is_that_of_trl_s_own_trainer(tensors: tuple[torch.dtype, bool, bool]) -> None:
    """GMPO with its metrics. TRL's GMPO trainer has no correction, and its metrics are NaN with truncated completions.
    Both are left out."""
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    dtype, on_policy, _ = tensors
    step, kl = case(dtype, False, False), KL[1]
    trainer = trl_trainer("gmpo", "token", None, kl, "none", 1.0, None, None)
    trainer._compute_loss = lambda model, inputs: gmpo.GMPOTrainer._compute_loss(trainer, model, inputs)
    inputs, _ = trl_inputs(dtype, on_policy, False, None, True, False)
    logprobs = padded(step, step.logprobs.detach()).requires_grad_()
    theirs = trl_oracle.loss_of(trainer, inputs, logprobs, padded(step, step.entropies.detach()))
    objective = objective_of("gmpo", "token", None, kl, "none", 1.0, None, None)
    ours, outputs = our_loss(objective, step, step.rows(30, on_policy))
    places = padded(step, torch.ones_like(step.old)).bool()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradients(ours, step.logprobs)[0], gradients(theirs, logprobs)[0][places], rtol=1e-5, atol=1e-6
    )
    metrics = Metrics()
    for output in outputs:
        metrics.update(output.sums, output.minima, output.maxima)
    found, expected = metrics.reduce(), trl_oracle.metrics_of(trainer)
    for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
        assert found[f"clip_ratio/{name}"] == pytest.approx(expected[f"clip_ratio/{name}"], rel=1e-5), name


# -- Metrics

# Which TRL hasn't (tests/losses/test_mismatch.py).
OF_MISMATCH = {MASKED, MASKED_TOKENS, TRUNCATED, f"{DIFFERENCE}{SIGNED}", f"{DIFFERENCE}{SQUARE}", f"{RAW}{SQUARE}"}
OF_MISMATCH |= {f"{RAW}/{name}" for name in ("mean", "min", "max")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", OF_TRL)
def test_metrics_equal_trl_s(loss_type: str, level: str) -> None:
    """No completion is truncated, because TRL counts masked tokens as a completion if the ratio is per completion."""
    names: set[str] = set()
    for correction, tensors in itertools.product(CORRECTIONS[1:], TENSORS):
        if not accepted(loss_type, correction):
            continue
        dtype, on_policy, per_token = tensors
        if per_token and (level == "sequence" or loss_type == "vespo"):
            continue  # TRL then weighs completions by their length
        kl = KL[2] if comparable((level, correction, KL[2]), tensors) else KL[1]
        combination = (level, correction, kl, "fixed", 0.6, None, None)
        step, trainer = case(dtype, per_token, False), trl_trainer(loss_type, *combination)
        inputs, before = trl_inputs(dtype, on_policy, per_token, correction, True, False)
        logprobs, entropies = padded(step, step.logprobs.detach()), padded(step, step.entropies.detach())
        value = trl_oracle.loss_of(trainer, inputs, logprobs, entropies)
        expected = {k: v for k, v in before.items() if k.startswith("sampling/")} | trl_oracle.metrics_of(trainer)
        controller, metrics = controller_of(entropy_coef=0.3), Metrics()
        ours, outputs = our_loss(objective_of(loss_type, *combination), step, step.rows(30, on_policy), 0.3)
        for output in outputs:
            metrics.update(output.sums, output.minima, output.maxima)
        found = metrics.reduce()
        controller.finish(found, ours.item())
        found = {name: value for name, value in found.items() if name not in OF_MISMATCH}
        if "cispo_clip_ratio" in found:  # TRL counts only positive advantages
            assert found.pop("cispo_clip_ratio") >= expected.pop("cispo_clip_ratio")
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), (correction, tensors)
        assert ours.item() == pytest.approx(value.item(), rel=1e-5)
        names |= found.keys()
    shown = {"kl", "entropy", "entropy_coef", "policy_loss", "sampling/importance_sampling_ratio/min"}
    own: dict[str, set[str]] = {"cispo": set(), "vespo": {"vespo/phi_seq_mean"}, "sapo": set()}
    assert names >= shown | own.get(loss_type, {"clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max"})


# -- The adaptive coefficient


def controller_of(**settings: Any) -> EntropyController:
    config = trl_oracle.bare_trainer(**settings).args  # TRL's defaults
    return EntropyController(config)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3, 0.99])
def test_the_coefficient_goes_trl_s_way(entropy_coef: float) -> None:
    """Ten steps: the entropy falls below the target and rises again."""
    settings = {"use_adaptive_entropy": True, "entropy_coef": entropy_coef, "entropy_coef_delta": 0.1,
                "entropy_coef_min": 0.05, "entropy_coef_max": 1.0, "entropy_target": 0.5}  # fmt: skip
    controller = controller_of(**settings)
    trainer = trl_oracle.bare_trainer(
        **KNOBS, **settings, loss_type="dapo", vllm_importance_sampling_correction=False, top_entropy_quantile=0.7
    )
    step, applied = case(torch.float64, False), []
    inputs, _ = trl_inputs(torch.float64, False, False, None, False)
    objective = make_objective("dapo", entropy_bonus=True, top_entropy_quantile=0.7)
    entropies = step.entropies.detach()
    for scale in (1.0, 0.5, 0.2, 0.1, 0.1, 0.1, 0.4, 1.0, 2.0, 0.1):
        step.entropies = (entropies * scale).requires_grad_()
        logprobs, padded_entropies = padded(step, step.logprobs.detach()), padded(step, step.entropies.detach())
        theirs = trl_oracle.loss_of(trainer, inputs, logprobs, padded_entropies)
        applied.append(controller.applied)
        ours, outputs = our_loss(objective, step, step.rows(30, False), controller.applied)
        metrics = Metrics()
        for output in outputs:
            metrics.update(output.sums, output.minima, output.maxima)
        found = metrics.reduce()
        controller.finish(found, ours.item())
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
        expected = trl_oracle.metrics_of(trainer)
        for name in ("entropy_coef", "policy_loss", "entropy"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), (scale, name)
        assert controller.last_entropy == pytest.approx(trainer._last_world_entropy, rel=1e-6)
    step.entropies = entropies.requires_grad_()
    assert applied[0] == 0 and len(set(applied)) > 3, "closed at first, then moving"

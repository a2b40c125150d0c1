"""Truncated sampling: the trainer's distribution covers the tokens that the sampler kept."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOConfig, GRPOTrainer
from colograd.batch import FinishReason, Group, Logged, ModelInput, Prompt, Rollout, ScoredGroup
from colograd.extensions.agents.feature import AgentFeature
from colograd.extensions.custom_rollouts.source import UserFeature
from colograd.extensions.distillation.head import TeacherHead
from colograd.extensions.kept_tokens.engine.kept_tokens import KeptTokensRecord
from colograd.extensions.kept_tokens.rider import Candidates, KeptTokens
from colograd.policy import head as policy_head
from colograd.policy.head import Head
from colograd.policy.logprobs import PolicyForward, policy_logprobs
from colograd.policy.packing import pack
from colograd.rollout.group_records import RewardedGroup, group_bytes, group_of

TRUNCATED = {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8}


@pytest.mark.parametrize("tiles", [(3, 4), (7, 11)], ids=str)
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_values_and_gradients_are_those_of_a_softmax_over_what_was_kept(monkeypatch, cap, tiles) -> None:
    """Log-probabilities, entropies and the divergence from a teacher, in float64, tile by tile; one label's set is the
    whole vocabulary."""
    monkeypatch.setattr(policy_head, "tile_shape", lambda *_: tiles)
    torch.manual_seed(0)
    kind = {"dtype": torch.float64}
    given = [torch.randn(7, 6, **kind), torch.randn(11, 6, **kind), torch.randn(11, **kind)]
    given = [tensor.requires_grad_() for tensor in given]
    states, labels = torch.randn(7, 5, **kind), torch.randint(0, 11, (7,))
    left = torch.rand(7, 11) < 0.4
    left[torch.arange(7), labels] = True
    left[2] = True
    counts = left.sum(1).masked_fill(left.all(1), 0)
    ids = torch.cat([row.nonzero()[:, 0] for row in left if not row.all()])
    kept = Candidates(KeptTokens(ids.int(), counts.int()), torch.device("cpu"))
    transform = {"scale": 0.5, "softcap": cap}
    teacher = TeacherHead.of(tiny.head_only(torch.randn(13, 5, **kind), torch.randn(13, **kind), 0.5, cap))

    def plain(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        logits = 0.5 * (h @ w.t() + b)
        return ((cap * torch.tanh(logits / cap) if cap else logits) / 0.8).masked_fill(~left, -1e30).log_softmax(-1)

    logp, logq = plain(*given), plain(states, teacher.weight[:11], teacher.bias[:11])
    expected = [logp.gather(1, labels[:, None])[:, 0]]
    expected += [-(logp.exp() * logp).sum(-1), (logp.exp() * (logp - logq)).sum(-1)]
    head = Head(0.8, dtype=torch.float64, candidates=kept, **transform)
    found = policy_head.label_logprobs(*given, labels, head, True, teacher.logits(states, 0.8, kept))
    weights = torch.randn(3, 7, **kind)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    theirs = torch.autograd.grad(sum((weights[i] * expected[i]).sum() for i in range(3)), given)
    for one, other in zip(torch.autograd.grad((weights * torch.stack(found)).sum(), given), theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert not one[~left.any(0)].any(), "what was never kept has no gradient"


def test_a_record_has_what_was_kept_and_a_broken_one_is_refused() -> None:
    prompt = Prompt({}, ModelInput((1, 2)), 3)
    kept = KeptTokens(torch.tensor([5, 6, 9], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32))

    def rollout(of: KeptTokens | None) -> Rollout:
        known = torch.zeros(3), torch.ones(3, dtype=torch.bool)
        return Rollout(
            prompt.input, array("i", [5, 7, 9]), *known, FinishReason.STOP, 0, riders=() if of is None else (of,)
        )

    def written(of: KeptTokens | None) -> bytes:
        group = Group({}, (rollout(of), rollout(None)), 3)
        return group_bytes(RewardedGroup(group, torch.zeros(2, 1), Logged({}, {})))

    first, second = group_of(written(kept), prompt).group.rollouts
    assert first.get(KeptTokens).ids.tolist() == [5, 6, 9] and second.riders == ()
    assert first.get(KeptTokens).counts.tolist() == [2, 0, 1]
    for broken in (KeptTokens(kept.ids[:2], kept.counts), KeptTokens(kept.ids, kept.counts[:2])):
        with pytest.raises(ValueError, match=r"can't be read \(AssertionError"):
            group_of(written(broken), prompt)


def test_where_it_can_t_be_recorded_the_correction_is_off_or_refused(tmp_path: Path) -> None:
    def made(**settings: Any) -> GRPOConfig:
        return tiny.config(tmp_path, **settings)

    recorded = made(**TRUNCATED)
    assert recorded.replays_truncation and any("truncates the sampler's distribution" in n for n in recorded.notes)
    assert not made().replays_truncation
    for settings, said in (
        ({"top_p": 0.9}, "with a top_k, of 1024 say"),
        (TRUNCATED | {"repetition_penalty": 1.1}, "correction is off"),
        ({"top_k": 8, "vllm_engine_kwargs": {"speculative_config": {}}}, "as drafts don't tell"),
    ):
        config = made(**settings)
        assert not config.replays_truncation and any(said in note for note in config.notes), config.notes
    with pytest.raises(ValueError, match="a rollout_func doesn't return the truncated distribution: remove top_k"):
        UserFeature.of(tiny.trainer_arguments(rollout_func=print), recorded)
    with pytest.raises(ValueError, match="the truncated distribution isn't recorded for agents"):
        AgentFeature.of(tiny.trainer_arguments(agent=print), recorded)


@pytest.mark.engine
def test_sampler_and_trainer_agree_on_a_truncated_distribution(tiny_model, tmp_path, closing) -> None:
    config = tiny.config(tmp_path, max_steps=2, **TRUNCATED)
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.small_letters, config, tiny.prompts()))
    groups = tiny.remembered_groups(trainer)
    trainer.train()
    gaps = [e["sampling/sampling_logp_difference/max"] for e in trainer.state.log_history if "grad_norm" in e]
    assert len(gaps) == 2 and max(gaps) < 1e-4, gaps
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sets = torch.cat([rollout.get(KeptTokens).counts for rollout in rollouts])
    assert sets.min() >= 1 and sets.max() <= 12 and sets.float().mean() > 2
    scored = [ScoredGroup(groups[0], torch.zeros(4, 1), torch.ones(4))]
    (row,) = pack(scored, 4096, mask_truncated=False, device=torch.device("cpu"))
    _, entropy = policy_logprobs(trainer.model, row, 0.8)
    assert (entropy <= row.get(KeptTokens).counts.log() + 1e-4).all()
    assert PolicyForward(trainer.model, 0.8)(row)[0].exp().max() <= 1.0001


def test_model_runner_v1_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(on_cpu=False)
    KeptTokensRecord(config).arguments({})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    remedy = "vllm_importance_sampling_correction: false"
    with pytest.raises(ValueError, match=f"VLLM_USE_V2_MODEL_RUNNER is 0: remove the variable, or set {remedy}"):
        KeptTokensRecord(config).arguments({})

"""Drafted tokens save steps of the engine and change nothing: tokens, log-probabilities, seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from colograd.batch import Prompt
from colograd.engine.sampling import Sampling
from colograd.engine.vllm_engine import VLLMEngine

PROMPTS = [Prompt({}, ids, position) for position, ids in enumerate([(5, 6, 7), (70, 71), (9, 8, 9, 8, 9, 8), (11,)])]
SAMPLING = Sampling(n=3, max_tokens=24, temperature=1.0, options={})
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def build(model: Path, folder: Path, **settings: Any) -> VLLMEngine:
    from colograd.runtime import process

    process.prepare_ranks()
    engine = VLLMEngine(str(model), tiny.config(folder, **settings), torch.float32, context=64, kv_bytes=2**22)
    engine.stamp(0)
    return engine


def generation(engine: VLLMEngine, sampling: Sampling = SAMPLING) -> tuple[list[Any], torch.Tensor, int]:
    """All completions in order, their log-probabilities, and the engine's steps."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    engine.after_step = count
    groups = sorted(engine.generate(PROMPTS, sampling, version=0, seed=3), key=lambda group: group.position)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    logprobs = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
    return [(tuple(r.completion_ids), r.finish_reason) for r in rollouts], logprobs, steps


@pytest.mark.engine
def test_drafts_change_no_token_and_save_steps(tiny_model: Path, tmp_path: Path) -> None:
    """Of vLLM's n-grams, at a temperature where completions repeat themselves, and at one where they don't."""
    cold = Sampling(n=3, max_tokens=24, temperature=0.3, options={"top_p": 0.9})
    plain = build(tiny_model, tmp_path)
    expected = [generation(plain), generation(plain, cold)]
    assert plain.take_counts() == {}
    plain.close()
    engine = build(tiny_model, tmp_path, vllm_engine_kwargs={"speculative_config": NGRAM})
    found = [generation(engine), generation(engine, cold)]
    counts = engine.take_counts()
    engine.close()
    for (tokens, logprobs, _), (own_tokens, own_logprobs, _) in zip(found, expected, strict=True):
        assert tokens == own_tokens
        torch.testing.assert_close(logprobs, own_logprobs, atol=1e-5, rtol=0)
    assert found[1][2] < expected[1][2]
    assert 0 < counts["drafts/accepted"] <= counts["drafts/tokens"]


@pytest.mark.parametrize(
    "settings, said",
    [({"min_p": 0.1}, "as min_p is set"), ({"router_replay": True}, "as router_replay is true")],
)
def test_what_drafts_cannot_be_had_with(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"speculative_config in vllm_engine_kwargs can't be had, {said}"):
        tiny.config(tmp_path, vllm_engine_kwargs={"speculative_config": NGRAM}, **settings)

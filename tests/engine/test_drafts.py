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


@pytest.mark.engine
def test_siblings_and_earlier_completions_are_drafts(tiny_model: Path, tmp_path: Path) -> None:
    """They change no token. Up to the most sequences; an earlier epoch's completions are known, whatever their weights.

    A sampled epoch first, then the same seeds again: most of each draft is right.
    """
    plain = build(tiny_model, tmp_path)
    expected, logprobs, steps = generation(plain)
    plain.close()
    engine = build(tiny_model, tmp_path, drafts="siblings", draft_sequences=16)
    first = generation(engine)
    engine.take_counts()
    engine.stamp(0)
    again = generation(engine)
    counts = engine.take_counts()
    engine.close()
    for tokens, own_logprobs, _ in (first, again):
        assert tokens == expected
        torch.testing.assert_close(own_logprobs, logprobs, atol=1e-5, rtol=0)
    assert again[2] < steps / 2
    assert counts["drafts/accepted"] > 0.8 * counts["drafts/tokens"]
    few = build(tiny_model, tmp_path, drafts="siblings", draft_sequences=1)
    assert [generation(few)[0], generation(few)[0]] == [expected, expected]
    drafted = few.take_counts()["drafts/tokens"]
    few.close()
    assert drafted < counts["drafts/tokens"] / 4


@pytest.mark.engine
@pytest.mark.slow
def test_drafts_leave_the_distribution_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    """10^5 tokens against the target model's own probabilities, by a chi-square test.

    Each prompt's first tokens are counted, and the second ones behind the commonest first one: an accepted draft or a
    token behind one. Expected are the probabilities that transformers computes.
    """
    from transformers import AutoModelForCausalLM

    prompts = [Prompt({}, prompt.prompt_ids, position) for prompt in PROMPTS[:2] for position in range(25)]
    prompts = [Prompt({}, each.prompt_ids, position) for position, each in enumerate(prompts)]
    sampling = Sampling(n=500, max_tokens=4, temperature=0.04, options={"ignore_eos": True})
    engine = build(tiny_model, tmp_path, drafts="siblings", draft_sequences=10**6)
    groups = list(engine.generate(prompts, sampling, version=0, seed=11))
    counts = engine.take_counts()
    engine.close()
    assert counts["drafts/accepted"] > 1000
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    found: dict[tuple[int, ...], list[int]] = {}  # what is read -> the tokens behind it
    tokens = 0
    for group in groups:
        read = tuple(group.rollouts[0].input.ids)
        for rollout in group.rollouts:
            ids = tuple(rollout.completion_ids)
            tokens += len(ids)
            for place in range(len(ids)):
                found.setdefault(read + ids[:place], []).append(ids[place])
    assert tokens >= 10**5
    statistic = freedom = 0.0
    for read, behind in found.items():
        if len(behind) < 200:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([read])).logits[0, -1].double() / sampling.temperature
        expected = logits.softmax(-1) * len(behind)
        seen = torch.bincount(torch.tensor(behind), minlength=len(expected)).double()
        common = expected >= 5  # what is rarer counts as one, as the test asks for
        expected, seen = (torch.cat([values[common], values[~common].sum()[None]]) for values in (expected, seen))
        statistic += float(((seen - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
    assert freedom > 100
    # The chi-square distribution of many degrees of freedom (Wilson and Hilferty): 4 standard deviations.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(deviation) < 4, f"chi-square {statistic:.0f} of {freedom:.0f} degrees of freedom"


@pytest.mark.parametrize(
    "settings, said",
    [({"min_p": 0.1}, "as min_p is set"), ({"router_replay": True}, "as router_replay is true")],
)
def test_what_drafts_cannot_be_had_with(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"speculative_config in vllm_engine_kwargs can't be had, {said}"):
        tiny.config(tmp_path, vllm_engine_kwargs={"speculative_config": NGRAM}, **settings)
    with pytest.raises(ValueError, match=f"drafts: siblings can't be had, {said}"):
        tiny.config(tmp_path, drafts="siblings", **settings)

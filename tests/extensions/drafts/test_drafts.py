"""Drafted tokens save steps of the engine and change nothing: tokens, log-probabilities, seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from needs import needs
from safetensors.torch import load_file, save_file

from colograd import GRPOTrainer
from colograd.batch import Prompt
from colograd.engine.arguments import graph_sizes
from colograd.engine.protocol import EngineUse, after_each_step
from colograd.engine.sampling import Sampling
from colograd.engine.vllm_engine import VLLMEngine

PROMPTS = [Prompt({}, ids, position) for position, ids in enumerate([(5, 6, 7), (70, 71), (9, 8, 9, 8, 9, 8), (11,)])]
SAMPLING = Sampling(n=3, max_tokens=24, temperature=1.0, options={})
SAMPLING_FAR = Sampling(n=3, max_tokens=100, temperature=1.0, options={"ignore_eos": True})
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def build(model: Path, folder: Path, blank: bool = False, **settings: Any) -> VLLMEngine:
    from colograd.runtime import process

    process.prepare_ranks()
    config = tiny.config(folder, **settings)
    engine = VLLMEngine(str(model), config, torch.float32, context=64, kv_bytes=2**22, use=EngineUse(blank=blank))
    engine.stamp(0)
    return engine


def generation(engine: VLLMEngine, sampling: Sampling = SAMPLING) -> tuple[list[Any], torch.Tensor, int]:
    """Generate, and return all completions in order, their log-probabilities, and the engine's steps."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    with after_each_step(engine, count):
        groups = sorted(engine.generate(PROMPTS, sampling, version=0, seed=3), key=lambda group: group.position)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    logprobs = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
    return [(tuple(r.completion_ids), r.finish_reason) for r in rollouts], logprobs, steps


@pytest.mark.engine
def test_drafts_change_no_token_and_save_steps(tiny_model: Path, tmp_path: Path) -> None:
    """vLLM's n-gram drafts, at a temperature with repetitive completions and at one without repetitions."""
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


def eagle_head(folder: Path, model: Path) -> Path:
    """An EAGLE head of random weights for a Llama, as its checkpoints are: one layer, without embeddings and a head."""
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    random = torch.Generator().manual_seed(1)
    shapes = {
        "fc": (width, 2 * width),
        "layers.0.self_attn.q_proj": (queries, width),
        "layers.0.self_attn.k_proj": (keys, width),
        "layers.0.self_attn.v_proj": (keys, width),
        "layers.0.self_attn.o_proj": (width, queries),
        "layers.0.mlp.gate_proj": (inner, width),
        "layers.0.mlp.up_proj": (inner, width),
        "layers.0.mlp.down_proj": (width, inner),
    }
    weights = {f"{name}.weight": 0.05 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.slow  # the test above has drafts without a head
@pytest.mark.engine
def test_an_eagle_head_drafts_for_a_policy_that_moves(tiny_model: Path, tmp_path: Path) -> None:
    """Runs with and without the head sample the same tokens. The head shares the policy's embeddings and output head,
    and publishing leaves its own weights unchanged."""
    head = eagle_head(tmp_path / "head", tiny_model)
    drafts = {"speculative_config": {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}}
    sampled = []
    for kwargs in (None, drafts):
        config = tiny.config(tmp_path / str(bool(kwargs)), max_steps=2, temperature=0.3, vllm_engine_kwargs=kwargs)
        trainer = GRPOTrainer(str(tiny_model), tiny.vowels, args=config, train_dataset=tiny.prompts())
        groups = tiny.remembered_groups(trainer)
        trainer.train()
        sampled.append([tuple(rollout.completion_ids) for group in groups for rollout in group.rollouts])
    assert sampled[0] == sampled[1]
    assert sum(entry.get("drafts/tokens", 0) for entry in trainer.state.log_history) > 0
    target, drafter = trainer.engine.model, trainer.engine._runner.drafter.model
    assert drafter.model.embed_tokens is target.model.embed_tokens and drafter.lm_head is target.lm_head
    written = load_file(head / "model.safetensors")
    torch.testing.assert_close(drafter.model.fc.weight, written["fc.weight"], rtol=0, atol=0)
    trainer.engine.close()
    blank = build(tiny_model, tmp_path, blank=True, vllm_engine_kwargs=drafts)
    fc = blank._runner.drafter.model.model.fc.weight.clone()
    blank.close()
    torch.testing.assert_close(fc, written["fc.weight"], rtol=0, atol=0)


@pytest.mark.engine
@pytest.mark.slow
def test_drafts_leave_the_distribution_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    """10^5 tokens, many of them accepted drafts, against the probabilities that transformers computes: a chi-square
    test of the tokens behind each text that was read 200 times or more."""
    from transformers import AutoModelForCausalLM

    prompts = [Prompt({}, PROMPTS[position % 2].prompt_ids, position) for position in range(50)]
    sampling = Sampling(n=500, max_tokens=4, temperature=0.1, options={"ignore_eos": True})
    engine = build(tiny_model, tmp_path, vllm_engine_kwargs={"speculative_config": NGRAM})
    groups = list(engine.generate(prompts, sampling, version=0, seed=11))
    counts = engine.take_counts()
    engine.close()
    behind: dict[tuple[int, ...], list[int]] = {}  # prefix -> the tokens sampled after it
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        read = (*rollout.input.ids, *rollout.completion_ids)
        for place in range(len(rollout.input.ids), len(read)):
            behind.setdefault(read[:place], []).append(read[place])
    assert sum(map(len, behind.values())) == 10**5 and counts["drafts/accepted"] > 10**4
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    statistic = freedom = 0.0
    for read, tokens in behind.items():
        if len(tokens) < 200:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([read])).logits[0, -1].double() / sampling.temperature
        expected = logits.softmax(-1) * len(tokens)
        seen = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
        common = expected >= 5  # the test holds for these; the others count as one
        seen, expected = (torch.cat([values[common], values[~common].sum()[None]]) for values in (seen, expected))
        if expected[-1] < 5:
            seen, expected = seen[:-1], expected[:-1]
        statistic += float(((seen - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
    # Its deviation from the mean, a standard normal variable (Wilson and Hilferty, doi.org/10.1073/pnas.17.12.684).
    deviation = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5
    assert freedom > 80 and abs(deviation) < 4, f"chi-square {statistic:.0f}, {freedom:.0f} degrees of freedom"


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"min_p": 0.1}, "min_p is 0.1"),
        pytest.param({"router_replay": True}, "router_replay is true and vllm_engine_kwargs", marks=needs("experts")),
        ({"generation_kwargs": {"min_tokens": 2}}, "generation_kwargs has min_tokens: 2"),
    ],
)
def test_what_drafts_cannot_be_had_with(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{said}.*remove one of them"):
        tiny.config(tmp_path, vllm_engine_kwargs={"speculative_config": NGRAM}, **settings)


@pytest.mark.engine
def test_a_model_with_a_state_has_no_drafts_on_a_cpu(tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "model", family="lfm2")
    with pytest.raises(ValueError, match="This model has layers with a recurrent state"):
        build(model, tmp_path, vllm_engine_kwargs={"speculative_config": NGRAM})


def test_cuda_graphs_are_captured_for_steps_with_drafts() -> None:
    """vLLM captures only multiples of a sequence's tokens with drafts, up to the largest requested size."""
    assert graph_sizes(4, 4) == [1, 2, 4]
    assert graph_sizes(4, 4, 32, 8) == [8, 16, 24, 32]
    assert graph_sizes(20, 20, 64, 8) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert graph_sizes(100, 100, 64, 8)[-1] == 104

"""Publishing, with the real vLLM: where the weights are stored, the bytes that a publish copies, the refusals."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import model_runner_v2
import plain_vllm
import pytest
import tiny
import torch
from detached import detached
from paths import MODEL
from transformers import AutoModelForCausalLM

from colograd import GRPOTrainer
from colograd.batch import Prompt
from colograd.engine.sampling import Sampling
from colograd.engine.vllm_engine import VLLMEngine
from colograd.runtime import process
from colograd.weights import proof, state_dict_on_host, weight_sync
from colograd.weights.mapping import UnmappedParameter, map_parameters
from colograd.weights.sync import SharedWeights

FAMILIES = [  # tied or not; most of them in the slow suite
    ("llama", False), ("gemma3", True),
    *(pytest.param(*of, marks=pytest.mark.slow)
      for of in (("llama", True), ("qwen2", True), ("qwen2", False), ("qwen3", True), ("qwen3", False),
                 ("gemma3", False))),
]  # fmt: skip
GREEDY = Sampling(n=1, max_tokens=12, temperature=0.0, options={})


def build(model: Any, tmp_path: Path, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(model, tiny.vowels, tiny.config(tmp_path / "run", **changes), tiny.prompts())


def greedy(engine: VLLMEngine, version: int) -> dict[int, tuple[int, ...]]:
    tokenizer = tiny.make_tokenizer()
    prompts = [Prompt({}, tuple(tokenizer(text).input_ids), i) for i, text in enumerate(["one", "22", "three hundred"])]
    groups = engine.generate(prompts, GREEDY, version=version, seed=0)
    return {group.position: list(group.rollouts[0].completion_ids) for group in groups}


def storages(model: torch.nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


@pytest.mark.engine
@pytest.mark.parametrize(("family", "tied"), FAMILIES, ids=lambda value: str(value))
def test_policy_shares_the_engines_memory(family, tied, tmp_path, tried) -> None:
    """Every parameter lies in the engine's storage, a publish moves no byte, and after six steps the saved checkpoint,
    in plain transformers and in an engine of its own, is the model that was trained."""
    model = tiny.make_model(tmp_path / "model", family, tied)
    steps = model_runner_v2.steps(6)
    trainer = build(str(model), tmp_path, max_steps=steps, learning_rate=5e-3)
    try:
        assert isinstance(trainer.weights, SharedWeights) and not trainer.weights.copied
        assert storages(trainer.model) <= storages(trainer.engine.model)
        assert trainer.weights.publish(0) == 0
        before = greedy(trainer.engine, 0)
        trainer.train()
        assert trainer.weights.publish(steps) == 0
        after = greedy(trainer.engine, steps)
        assert after != before or steps < 6, "six steps at this rate change what is said"
        probe = proof.probe_ids(trainer.engine, 40)
        logprobs = trainer.engine.prompt_logprobs(probe)
        trainer.save_model(str(tmp_path / "saved"))
        trained = {name: p.detach().to("cpu", copy=True) for name, p in trainer.model.named_parameters()}
    finally:
        trainer.close()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert {name for name, _ in loaded.named_parameters()} == trained.keys()
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())
    with torch.no_grad():
        theirs = (
            loaded(torch.tensor([probe])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(probe[1:])[:, None])
        )
    torch.testing.assert_close(theirs[:, 0], logprobs, rtol=0, atol=1e-4)
    with process.rank_variables():
        fresh = VLLMEngine(str(tmp_path / "saved"), trainer.args, torch.float32, context=64, kv_bytes=2**22)
    try:
        fresh.stamp(steps)
        assert greedy(fresh, steps) == after
        torch.testing.assert_close(fresh.prompt_logprobs(probe), logprobs, rtol=0, atol=0)
    finally:
        fresh.close()
    tried(family, "shared", "saved")


@pytest.mark.slow  # the test above has it after six steps
@pytest.mark.engine
def test_plain_vllm_loads_what_was_saved(tiny_qwen: Path, tmp_path, closing) -> None:
    trainer = closing(build(str(tiny_qwen), tmp_path, max_steps=3))
    trainer.train()
    trainer.publish()
    probe = proof.probe_ids(trainer.engine, 40)
    trainer.save_model(str(tmp_path / "saved"))
    found = plain_vllm.prompt_logprobs(tmp_path / "saved", probe, tmp_path)
    torch.testing.assert_close(found, trainer.engine.prompt_logprobs(probe), rtol=0, atol=1e-4)


SMOLLM2 = MODEL


@pytest.mark.slow
@pytest.mark.engine
def test_smollm2_shares_every_parameter(tmp_path) -> None:
    """The quickstart's model in float32, 20 steps: all 272 parameters in the engine's memory, 0 bytes copied, and the
    saved folder has equal log-probabilities in transformers, in a new engine and in plain vLLM."""
    trainer = build(str(SMOLLM2), tmp_path, max_steps=20, num_generations=2, prompts_per_step=2, learning_rate=1e-5)
    try:
        assert len(trainer.weights.shared) == 272 and not trainer.weights.copied
        assert storages(trainer.model) <= storages(trainer.engine.model)
        moved = []
        publish = trainer.weights.publish

        def counted(version: int) -> int:
            moved.append(publish(version))
            return moved[-1]

        trainer.weights.publish = counted
        trainer.train()
        trainer.publish()
        assert moved == [0] * 21
        after, probe = greedy(trainer.engine, 20), proof.probe_ids(trainer.engine, 60)
        logprobs = trainer.engine.prompt_logprobs(probe)
        trainer.save_model(str(tmp_path / "saved"))
    finally:
        trainer.close()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        rows = loaded(torch.tensor([probe])).logits[0, :-1].log_softmax(-1)
    theirs = rows.gather(1, torch.tensor(probe[1:])[:, None])[:, 0]
    torch.testing.assert_close(theirs, logprobs, rtol=0, atol=1e-3)
    fresh = VLLMEngine(str(tmp_path / "saved"), trainer.args, torch.float32, context=96, kv_bytes=2**27)
    try:
        fresh.stamp(20)
        assert greedy(fresh, 20) == after
    finally:
        fresh.close()
    torch.testing.assert_close(
        plain_vllm.prompt_logprobs(tmp_path / "saved", probe, tmp_path), logprobs, rtol=0, atol=1e-3
    )


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_sharing_changes_no_bit_of_the_training(tiny_model: Path, tmp_path, dtype) -> None:
    """The same run with shared and with copied weights, checkpointed: same losses, same final weights."""
    runs = []
    for weights in ("shared", "copied"):
        changes = {"weights": weights, "gradient_checkpointing": True, "model_init_kwargs": {"dtype": dtype}}
        trainer = build(str(tiny_model), tmp_path / weights, **changes)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))
        trainer.close()
    (shared, first), (copied, second) = runs
    assert shared == copied and len(shared) == 4
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.engine
def test_moved_weight_is_an_error_on_either_side(tiny_model: Path, tmp_path, closing) -> None:
    trainer = closing(build(str(tiny_model), tmp_path))
    trainer.publish()
    name = "model.layers.0.self_attn.o_proj.weight"
    for side, model in (("policy", trainer.model), ("engine", trainer.engine.model)):
        parameter = model.get_parameter(name)
        kept = parameter.data
        parameter.data = kept.clone()
        with pytest.raises(RuntimeError, match=rf"1 weights have moved .*\({side} {re.escape(name)}\)"):
            trainer.weights.publish(1)
        parameter.data = kept
    layer = trainer.engine.model.get_submodule("model.layers.0.self_attn.o_proj")
    kept = layer.weight
    layer.weight = torch.nn.Parameter(kept.detach().clone(), requires_grad=False)  # as a layer-wise reload does
    with pytest.raises(RuntimeError, match="1 weights have moved"):
        trainer.weights.publish(1)
    layer.weight = kept
    assert trainer.weights.publish(1) == 0


@pytest.mark.engine
def test_failed_cache_reset_and_missing_publish_are_errors(tiny_model: Path, tmp_path, closing, monkeypatch) -> None:
    trainer = closing(build(str(tiny_model), tmp_path, max_steps=2))
    with monkeypatch.context() as patched:
        patched.setattr(trainer.engine.core, "reset_prefix_cache", lambda *a, **k: False)
        with pytest.raises(RuntimeError, match="could not reset its prefix cache at step 0"):
            trainer.publish()
        assert trainer.engine.version is None, "nothing may be sampled now"
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "publish", lambda: trainer.weights.publish(0))  # and never again
        with pytest.raises(RuntimeError, match=r"weights of step 0, but the trainer is at step 1: call `publish`"):
            trainer.train()


@pytest.mark.engine
def test_first_rollout_samples_an_edited_model(tiny_model: Path, tmp_path, closing) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    trainer = closing(build(model, tmp_path, model_init_kwargs=None, max_steps=1))
    assert isinstance(trainer.weights, SharedWeights)
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    assert entry["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.engine
def test_another_dtype_is_copied_or_refused(tiny_model: Path, tmp_path, tried) -> None:
    half = {"vllm_engine_kwargs": {"dtype": "bfloat16"}}
    trainer = build(str(tiny_model), tmp_path, **half)
    try:
        nbytes = sum(2 * p.numel() for p in trainer.model.parameters())
        assert "copied, 20 parameters" in trainer.weights.describe()
        assert "the engine has it in bfloat16, the policy in float32" in trainer.weights.describe()
        assert trainer.weights.publish(0) == nbytes and trainer.weights.differing() == []
        with pytest.raises(ValueError, match=r"`weights` is 'shared', but 20 of 20 .*bfloat16.* `weights: auto`"):
            weight_sync("shared", trainer.model, trainer.engine, untouched=True, device=torch.device("cpu"))
        trainer.model.resize_token_embeddings(300)
        with pytest.raises(ValueError, match=r"300 rows of embeddings, but the checkpoint that vLLM loaded has 258"):
            weight_sync("auto", trainer.model, trainer.engine, untouched=False, device=torch.device("cpu"))
    finally:
        trainer.close()
    tried("llama", copied="into another dtype")


class TestProof:
    """Faults that are hard to notice: an engine that samples from a private copy, a weight in the wrong place."""

    @pytest.fixture
    def engine(self, tiny_model: Path, tmp_path):
        process.prepare_ranks()
        built = VLLMEngine(str(tiny_model), tiny.config(tmp_path), torch.float32, context=64, kv_bytes=2**22)
        yield built
        built.close()

    @pytest.mark.engine
    def test_each_parameter_is_shown_to_be_read(self, engine, tiny_model: Path) -> None:
        policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        device = next(engine.model.parameters()).device
        slices = map_parameters(policy, engine.tensors)
        before = {part.name: part.destination.clone() for part in slices}
        assert proof.unread(slices, engine) == []
        assert all(torch.equal(part.destination, before[part.name]) for part in slices), "every bit is back"

        # A layer that computes from a copy of its own: the value of the parameter is right, and nobody reads it.
        layer = engine.model.get_submodule("model.layers.1.mlp.down_proj")
        live, private = layer.cpu_linear, layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, private, bias)
        assert [part.name for part in proof.unread(slices, engine)] == ["model.layers.1.mlp.down_proj.weight"]
        for wanted in ("auto", "copied"):
            with pytest.raises(RuntimeError, match=r"doesn't depend on 1 of 20 .*layers\.1\.mlp\.down_proj"):
                weight_sync(wanted, policy, engine, untouched=True, device=device)
        layer.cpu_linear = live

        # Another value than the engine's, though both came from one checkpoint.
        policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        policy.model.layers[0].mlp.up_proj.weight.data.neg_()
        with pytest.raises(RuntimeError, match=r"1 parameters differ .*up_proj"):
            weight_sync("auto", policy, engine, untouched=True, device=device)

        # Behind an output projection of zeros nothing can be seen, here or there: these are copied.
        engine.model.get_parameter("model.layers.0.self_attn.o_proj.weight").data.zero_()
        policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        policy.model.layers[0].self_attn.o_proj.weight.data.zero_()
        plan = weight_sync("auto", policy, engine, untouched=False, device=device)
        hidden = [
            f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        ]
        assert sorted(part.name for part, _ in plan.copied) == sorted(
            [*hidden, "model.layers.0.input_layernorm.weight"]
        )
        policy.model.layers[0].self_attn.q_proj.weight.data.add_(1)
        assert plan.differing() == hidden[:1]
        assert plan.publish(1) == sum(4 * part.destination.numel() for part, _ in plan.copied)
        assert plan.differing() == []

    @pytest.mark.engine
    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's engine packs no weights away")
    def test_engine_with_packed_weights_is_refused(self, tiny_model: Path, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("colograd.engine.building.live_weights", contextlib.nullcontext)
        with pytest.raises(UnmappedParameter, match="has no unique counterpart in the engine"):
            build(str(tiny_model), tmp_path)

    @pytest.mark.engine
    @pytest.mark.parametrize(
        "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2", "qwen3", "gemma3"))]
    )
    def test_proof_names_any_copied_parameter(self, family, tmp_path) -> None:
        """One pass shows that most parameters are read. Gemma's norms multiply by 1 + weight and need a pass each."""
        folder = tiny.make_model(tmp_path / "model", family, tied=family != "qwen2")
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        process.prepare_ranks()
        engine = VLLMEngine(str(folder), tiny.config(tmp_path), torch.float32, context=64, kv_bytes=2**22)
        try:
            slices = map_parameters(policy, engine.tensors)
            held = {part.name: part.destination.clone() for part in slices}
            shown = proof.read_together(slices, policy, engine, slices)
            alone = {part.name for part in slices} - shown
            assert all("norm" in name for name in alone) and (family == "gemma3" or len(alone) <= 1), alone
            assert proof.check_read(slices, policy, engine) == []
            for part in slices:
                with detached(engine, part), pytest.raises(RuntimeError, match=rf" 1 of {len(slices)} ") as refused:
                    proof.check_read(slices, policy, engine)
                assert f"({part.name})" in str(refused.value)
            assert all(torch.equal(part.destination, held[part.name]) for part in slices), "every bit is back"
            assert all(torch.equal(p, old) for p, old in zip(policy.parameters(), before, strict=True))
            assert all(p.requires_grad and p.grad is None for p in policy.parameters())
        finally:
            engine.close()

    @pytest.mark.engine
    def test_proof_detects_parameters_that_aren_t_read(self, engine, tiny_model: Path) -> None:
        """An engine with unread parameters gives the same output after changes that cancel each other."""
        policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        slices = map_parameters(policy, engine.tensors)
        layer = [part for part in slices if ".layers.1." in part.name]
        attention = [part for part in layer if "self_attn" in part.name or "input_layernorm" in part.name]
        projections = [part for part in slices if "_proj" in part.name]
        for gone in (slices, layer, attention, projections, projections[1:3]):
            with detached(engine, *gone):
                shown = proof.read_together(slices, policy, engine, slices)
                assert shown.isdisjoint(part.name for part in gone)
                with pytest.raises(RuntimeError, match=rf"doesn't depend on {len(gone)} of 20 parameters"):
                    proof.check_read(slices, policy, engine)

    @pytest.mark.timeout(3000)  # 390 s by itself, 790 s in parallel
    @pytest.mark.slow
    @pytest.mark.engine
    def test_proof_detects_any_copied_parameter_of_smollm2(self, tmp_path, monkeypatch) -> None:
        """The check runs in the quickstart's bfloat16, and completely for one parameter of each kind."""
        policy = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.bfloat16)
        process.prepare_ranks()
        engine = VLLMEngine(str(SMOLLM2), tiny.config(tmp_path), torch.bfloat16, context=96, kv_bytes=2**25)
        try:
            slices = map_parameters(policy, engine.tensors)
            assert len(slices) == 272
            shown = proof.read_together(slices, policy, engine, slices)
            assert [part.name for part in slices if part.name not in shown] == ["model.norm.weight"]
            effects = proof.effects_on(proof.probe_ids(engine, proof.PROBE_TOKENS[0]), slices, policy)
            with monkeypatch.context() as patched:
                patched.setattr(proof, "effects_on", lambda *_: effects)  # the policy's, which nobody has changed
                patched.setattr(proof, "PROBE_TOKENS", (8,))
                for part in slices:
                    with detached(engine, part):
                        assert part.name not in proof.read_together(slices, policy, engine, slices)
                        assert proof.unread([part], engine) == [part]
            for part in [*slices[:2], next(part for part in slices if "layers.29.self_attn.v_proj" in part.name)]:
                with detached(engine, part), pytest.raises(RuntimeError, match=rf" 1 of 272 .*\({part.name}\)"):
                    proof.check_read(slices, policy, engine)
        finally:
            engine.close()


def test_cancelling_signs_need_llamas_names() -> None:
    plain = {"transformer.wte.weight": (10, 4), "transformer.h.0.attn.c_attn.weight": (4, 12)}
    assert proof.cancelling(plain, norms=True) == {}
    shapes = {
        "model.embed_tokens.weight": (10, 4), "model.layers.0.input_layernorm.weight": (4,),
        "model.layers.0.self_attn.q_proj.weight": (6, 4), "model.layers.0.self_attn.q_proj.bias": (6,),
        "model.layers.0.self_attn.o_proj.weight": (4, 6), "model.layers.0.mlp.gate_proj.bias": (8,),
        "model.norm.weight": (4,), "lm_head.weight": (10, 4),
    }  # fmt: skip
    found = proof.cancelling(shapes, norms=True)
    assert found.keys() == shapes.keys() - {"model.layers.0.mlp.gate_proj.bias"}
    assert all(bool((one.abs() == 1).all()) for one in found.values())
    stream, before = found["model.embed_tokens.weight"][0], found["model.layers.0.input_layernorm.weight"]
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"][0], -stream * before)
    assert torch.equal(found["lm_head.weight"][0], stream * found["model.norm.weight"])
    del shapes["lm_head.weight"]  # tied: the embedding's own signs are the head's, so that the norm between has none
    assert "model.norm.weight" not in proof.cancelling(shapes, norms=True)


def test_host_state_dict_has_whole_tensors_and_ties() -> None:
    model = torch.nn.Module()
    fused = torch.randn(6, 4)
    model.q = torch.nn.Parameter(fused[:4])
    model.k = torch.nn.Parameter(fused[4:])
    model.head = model.q
    host = state_dict_on_host(model)
    assert torch.equal(host["q"], fused[:4]) and torch.equal(host["k"], fused[4:])
    assert host["q"] is host["head"]
    for name in ("q", "k"):
        assert host[name].untyped_storage().nbytes() == host[name].numel() * 4
        assert host[name].untyped_storage().data_ptr() != fused.untyped_storage().data_ptr()

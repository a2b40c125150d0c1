"""Quantised bases below an adapter (QLoRA): the engine computes with exactly the policy's values, only the adapter is
trained, and untrainable settings are refused before anything is loaded."""

from __future__ import annotations

import functools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import large
import lora_cases
import peft
import plain_vllm
import pytest
import tiny
import torch
from paths import ROOT
from quantized_cases import (
    INT8,
    KINDS,
    NESTED,
    NF4,
    adapter_bytes,
    check_two_ranks,
    config,
    same_on_both_sides,
    steps,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Mxfp4Config

from colograd import GRPOTrainer, train
from colograd.apps import cli
from colograd.apps.replaying.replayer import Replay, Replayer
from colograd.config import ModelConfig
from colograd.extensions.lora.weights import AdapterWeights
from colograd.extensions.quantized import checkpoints as quantized
from colograd.extensions.quantized.engine.layers import ServedLayers
from colograd.extensions.quantized.layers import packed_bytes, packed_weight, packed_weights
from colograd.memory.description import PolicySizes
from colograd.policy import loading, lora, row_proof
from colograd.policy.loading import load_policy
from colograd.policy.supported import check_supported
from colograd.weights import proof
from colograd.weights.sync import MergedWeights, SharedWeights

bnb = pytest.importorskip("bitsandbytes")

MODEL, RECIPE = ROOT / "models" / "SmolLM2-135M-Instruct", ROOT / "recipes" / "grpo_qlora_smollm2_cpu.yaml"
PROJECTIONS = 2 * 7  # of two layers


def adapter(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**({"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | changes))


def policy_of(model: Path, folder: Path, settings: dict[str, Any], dtype: str = "float32", **changes: Any) -> Any:
    return load_policy(str(model), None, config(folder, settings, dtype), adapter(**changes))


def build(
    model: Path, folder: Path, settings: dict[str, Any] | None, lora: Any = None, **changes: Any
) -> lora_cases.Counting:
    args = config(folder, settings, **changes)
    return lora_cases.Counting(str(model), tiny.vowels, args, tiny.prompts(), peft_config=lora or adapter())


def exported(trainer: GRPOTrainer, folder: Path) -> Path:
    (newest,) = Path(trainer.args.output_dir).glob("checkpoint-3")
    assert cli.main(["export", str(newest), str(folder)]) == 0
    return folder


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        rows = model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three steps on an NF4 base, held to it by a KL term, with checkpoints of the second and third."""
    folder = tmp_path_factory.mktemp("quantized") / "run"
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "beta": 0.1, **tiny.ONE_BY_ONE}
    changes |= {"journal": "keep"}
    trainer = build(tiny_model, folder, NF4, **changes)
    trainer.before = {name: weight.layer.weight.clone() for name, weight in packed_weights(trainer.model).items()}
    trainer.train()
    yield trainer
    trainer.close()


@pytest.fixture
def at_start(trained) -> Any:
    """Set the engine's adapter to zero, as when the base is compared."""
    for slot in trained.weights.slots:
        slot.destination.zero_()
    yield
    trained.weights.publish(trained.state.global_step)


# -- in a run


@pytest.mark.engine
def test_sampler_and_trainer_agree_and_only_the_adapter_moves(trained, tried) -> None:
    assert isinstance(trained.weights, AdapterWeights) and isinstance(trained.weights.base, SharedWeights)
    assert "14 matrices (0 MiB) dequantised into the engine once, the rest is shared" in trained.weights.describe()
    same_on_both_sides(trained)
    assert all(layer.lora_b.abs().max() > 1e-3 for layer in lora.adapted_layers(trained.model))
    once = sum(part.destination.nbytes for part in trained.weights.base.slices if part.packed is not None)
    assert trained.moved == [adapter_bytes(trained) + once, adapter_bytes(trained), adapter_bytes(trained)]
    after = packed_weights(trained.model)
    assert len(after) == PROJECTIONS
    assert all(torch.equal(after[name].layer.weight, kept) for name, kept in trained.before.items())
    assert [step["kl"] > 0 for step in steps(trained)] == [False, True, True], "the reference is the quantised base"
    tried("llama", "qlora")


@pytest.mark.engine
def test_the_engine_has_bitsandbytes_own_values(trained) -> None:
    layer = trained.policy.model.get_base_model().model.layers[1]
    parts = [getattr(layer.self_attn, name).base_layer.weight for name in ("q_proj", "k_proj", "v_proj")]
    expected = torch.cat([bnb.functional.dequantize_4bit(part.data, part.quant_state) for part in parts])
    engine = {lora.base_name(name): p for name, p in trained.engine.model.named_parameters()}
    assert torch.equal(engine["model.layers.1.self_attn.qkv_proj.weight"], expected)
    loaded = AutoModelForCausalLM.from_pretrained(trained.policy.path).model.layers[1].self_attn.q_proj.weight.detach()
    assert 0.05 < float((expected[:64] - loaded).norm() / loaded.norm()) < 0.15, "not those of the checkpoint"


@pytest.mark.engine
def test_a_place_that_holds_something_else_is_found_at_start(trained, at_start) -> None:
    slices = trained.weights.base.slices
    packed = [part for part in slices if part.packed is not None]
    proof.check_same(trained.model, trained.engine)
    with proof.changed(packed[3].destination), pytest.raises(RuntimeError, match=r"log-probabilities differ by \d"):
        proof.check_same(trained.model, trained.engine)
    with proof.changed(packed[3].destination), pytest.raises(RuntimeError, match=re.escape(packed[3].name)):
        proof.check_equal(packed)
    proof.check_equal(packed)


@pytest.mark.engine
def test_each_quantised_parameter_is_shown_to_be_read(trained, at_start, monkeypatch) -> None:
    slices = trained.weights.base.slices
    packed = [part for part in slices if part.packed is not None]
    assert len(packed) == PROJECTIONS and proof.check_read(slices, trained.model, trained.engine) == []
    assert trained.weights.base.differing() == [], "each bit as before"
    monkeypatch.setattr(proof.Probe, "shift", lambda self: 0.0)  # an engine that reads copies of its own
    with pytest.raises(RuntimeError, match=r"doesn't depend on \d+ of \d+ parameters"):
        proof.check_read(packed, trained.model, trained.engine, slices)


@pytest.mark.slow  # recorded steps are trained again below
@pytest.mark.engine
def test_a_resumed_run_ends_with_the_same_bits(trained, tiny_model, tmp_path, closing) -> None:
    (checkpoint,) = Path(trained.args.output_dir).glob("checkpoint-2")
    again = closing(build(tiny_model, tmp_path / "run", NF4, beta=0.1, **tiny.ONE_BY_ONE))
    again.train(resume_from_checkpoint=str(checkpoint))
    mine, theirs = ([p for p in t.model.parameters() if p.requires_grad] for t in (trained, again))
    assert len(mine) == 2 * PROJECTIONS
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.engine
@pytest.mark.parametrize("first", [1, 3], ids=["from the model", "from a checkpoint"])
def test_recorded_steps_are_trained_again_bit_for_bit(first, trained, tiny_model, tmp_path, capfd) -> None:
    """Steps are replayed without an engine. The base is quantised again to the same values."""
    args = config(tmp_path, NF4, beta=0.1, journal="keep", report=False, **tiny.ONE_BY_ONE)
    given = {"train_dataset": tiny.prompts(), "peft_config": adapter(), "reward_funcs": tiny.vowels}
    again = Replayer(replay=Replay(Path(trained.args.output_dir), first, 3), model=str(tiny_model), args=args, **given)
    again.train()
    again.close()
    assert f"{4 - first} of {4 - first} step(s) came out bit for bit as recorded" in capfd.readouterr().out
    mine, theirs = ([p for p in t.model.parameters() if p.requires_grad] for t in (trained, again))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.engine
def test_what_is_saved_fits_its_base_alone_and_says_which(trained, tiny_model, tmp_path) -> None:
    """A folder with the adapter is a model to train: its base is quantised again as it was."""
    (checkpoint,) = Path(trained.args.output_dir).glob("checkpoint-3")
    assert not list(checkpoint.glob("model*.safetensors"))
    settings, dtype = quantized.beside(checkpoint)
    quantized.Quantized().check_adapter(trained.policy, str(checkpoint))
    with pytest.raises(ValueError, match=r"to NF4, but this run's base is without quantisation: set load_in_4bit"):
        quantized.Quantized().check_adapter(SimpleNamespace(quantization=None), str(checkpoint))
    assert dtype == torch.float32 and settings["bnb_4bit_quant_type"] == "nf4"
    check_supported(str(checkpoint), config(tmp_path))
    policy = load_policy(str(checkpoint), None, config(tmp_path))
    assert quantized.name_of(policy.quantization.settings) == "NF4" and not policy.quantization.in_checkpoint
    for ours, theirs in zip(policy.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.engine
def test_an_exported_model_is_plain_and_says_the_same(trained, tmp_path, capsys) -> None:
    folder = exported(trained, tmp_path / "exported")
    assert (
        "the NF4 base's values and the adapter, added in float32 and rounded once to float32" in capsys.readouterr().out
    )
    assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")
    trained.publish()
    ids = proof.probe_ids(trained.engine, 40)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.dtype == torch.float32
    with trained.model.disable_adapter():
        of_base = logprobs_of(trained.model, ids)
    assert (logprobs_of(plain, ids) - of_base).abs().mean() > 1e-3, "the adapter is in it"
    torch.testing.assert_close(logprobs_of(plain, ids), logprobs_of(trained.model, ids), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.engine
def test_plain_vllm_says_the_same_of_an_exported_model(trained, tmp_path) -> None:
    ids = proof.probe_ids(trained.engine, 40)
    found = plain_vllm.prompt_logprobs(exported(trained, tmp_path / "exported"), ids, tmp_path)
    torch.testing.assert_close(found, logprobs_of(trained.model, ids), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def packed_checkpoint(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 folder with NF4 weights and nested scales, like those on the Hub."""
    from transformers import BitsAndBytesConfig

    folder = tmp_path_factory.mktemp("packed") / "qwen2-bnb-4bit"
    settings = BitsAndBytesConfig(**NESTED, bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(tiny_qwen, quantization_config=settings, dtype=torch.float32).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(tiny_qwen).save_pretrained(folder)
    return folder


@pytest.mark.engine
def test_packed_checkpoint_trains_with_a_merged_adapter(packed_checkpoint, tmp_path, closing) -> None:
    """DoRA, biases and an untied head. vLLM skips the folder's weights and gets all weights from the policy."""
    trainer = closing(build(packed_checkpoint, tmp_path, None, adapter(use_dora=True)))
    assert trainer.policy.quantization.in_checkpoint and trainer.engine.blank
    assert isinstance(trainer.weights, MergedWeights)
    trainer.train()
    same_on_both_sides(trainer)


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["nested", pytest.param("int8", marks=pytest.mark.slow)])
def test_one_packed_base_serves_both_where_it_is_asked_for(kind, tiny_qwen, tmp_path, closing, tried) -> None:
    """`weights: shared`: the engine computes with the policy's packed weights, and log-probabilities are equal."""
    trainer = closing(build(tiny_qwen, tmp_path, KINDS[kind], weights="shared"))
    mine = {id(weight.layer) for weight in packed_weights(trainer.model).values()}
    served = {id(weight.layer) for weight in trainer.engine.served.weights}
    assert served == mine and len(mine) == PROJECTIONS and not trainer.engine.served.unused()
    assert "quantised, one memory with the engine's (14 packed matrices" in trainer.weights.describe()
    names = {p.numel() for name, p in trainer.engine.model.named_parameters() if "_proj" in name and "weight" in name}
    assert names == {0}
    assert trainer.engine.served.digest in trainer.engine.vllm_config.additional_config.values()
    trainer.train()
    same_on_both_sides(trainer)
    assert trainer.moved[1:] == [adapter_bytes(trainer)] * 2
    ids = proof.probe_ids(trainer.engine, 30)
    before = trainer.engine.prompt_logprobs(ids)
    scales = next(iter(packed_weights(trainer.model).values())).layer.weight
    with torch.no_grad():
        (scales.SCB if kind == "int8" else scales.quant_state.state2.absmax).mul_(2)
    assert not torch.equal(trainer.engine.prompt_logprobs(ids), before), "it is one memory"
    tried("qwen2", "qlora")


def test_layer_numbers_are_part_of_compile_cache_key() -> None:
    """Compiled code reads layers by number."""
    first, second, other = (ServedLayers(lambda tensors: {}) for _ in range(3))
    first.reserve(["up", "down"])
    first.add("down", ())
    second.reserve(["up", "down"])
    assert second.digest != first.digest, "no number is of two living layers"
    first.close()
    second.reserve(["up", "down"])
    other.reserve(["down"])
    assert second.digest == first.digest != other.digest, "the same policy finds what was compiled for it"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("kind", ["packed", "int8", "FP4", "object"])
def test_each_kind_of_base_agrees_with_its_engine(kind, packed_checkpoint, tiny_model, tmp_path, closing) -> None:
    if kind == "object":
        from transformers import BitsAndBytesConfig

        settings = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=settings, dtype=torch.float32)
        args = config(tmp_path, model_init_kwargs=None)
        trainer = closing(lora_cases.Counting(model, tiny.vowels, args, tiny.prompts(), peft_config=adapter()))
    else:
        given = (packed_checkpoint, None) if kind == "packed" else (tiny_model, KINDS[kind])
        trainer = closing(build(given[0], tmp_path, given[1]))
    assert isinstance(trainer.weights, AdapterWeights)
    trainer.train()
    same_on_both_sides(trainer)
    assert trainer.moved[1:] == [adapter_bytes(trainer)] * 2


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("weights", ["auto", "shared"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families_agree_too(family, weights, tmp_path, closing, tried) -> None:
    """Mixtures of experts: tests/extensions/experts/test_experts.py."""
    trainer = closing(build(tiny.make_model(tmp_path / family, family), tmp_path / "run", NF4, weights=weights))
    assert isinstance(trainer.weights, AdapterWeights)
    trainer.train()
    same_on_both_sides(trainer)
    tried(family, "qlora")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("sharding", ["none", "optimizer", "gradients", "one engine"])
def test_two_ranks_have_the_same_base_and_the_same_adapter(sharding, tiny_model, tmp_path) -> None:
    check_two_ranks(tiny_model, tmp_path, sharding)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="made by `make model`")
def test_smollm2_learns_on_a_base_of_4_bits(tmp_path, closing) -> None:
    """The recipe, as a new user runs it: some minutes on two cores."""
    arguments = ["--config", str(RECIPE), "--model_name_or_path", str(MODEL), "--output_dir", str(tmp_path)]
    trainer = closing(train.build(arguments))
    started = time.perf_counter()
    trainer.train()
    rewards = [step["reward"] for step in steps(trainer)]
    last = sum(rewards[-3:]) / 3
    print(f"SmolLM2, NF4: {rewards[0]:.2f} -> {last:.2f} in {time.perf_counter() - started:.0f} s")
    assert rewards[0] < 0.3 and last > 0.7


# -- the layers


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_amounts_to_what_the_layer_multiplies_with(kind, tiny_model, tmp_path) -> None:
    policy = policy_of(tiny_model, tmp_path, KINDS[kind])
    weights = packed_weights(lora.unwrap(policy.model))
    assert len(weights) == PROJECTIONS
    for name in ("model.layers.0.self_attn.k_proj.base_layer.weight", "model.layers.1.mlp.down_proj.base_layer.weight"):
        weight = weights[name]
        assert torch.equal(weight.layer(torch.eye(weight.shape[1])).T, weight.values())
        assert weight.nbytes == packed_bytes(weight.shape, KINDS[kind])


@pytest.mark.parametrize("kind", ["NF4", "int8"])
def test_packed_rows_equal_padded_ones_also_with_layers_computed_twice(kind, tiny_model, tmp_path) -> None:
    """Values with and without gradients are equal, although bitsandbytes has two kernels on some CPUs."""
    model = lora_cases.doing_something(policy_of(tiny_model, tmp_path, KINDS[kind], lora_dropout=0.0).model)
    assert row_proof.choose_rows(model) == ""
    packed = lora_cases.gradients(model, share_prompts=True)
    with torch.no_grad():
        still = lora_cases.logprobs(model.eval(), share_prompts=True)
    torch.testing.assert_close(still, packed[0], rtol=0, atol=1e-6)
    lora_cases.check_rows_agree(model, packed)


def test_an_8_bit_layer_has_the_gradient_of_its_dequantised_weight(tiny_qwen, tmp_path) -> None:
    policy = policy_of(tiny_qwen, tmp_path, INT8)
    layer = lora.unwrap(policy.model).model.layers[0].self_attn.q_proj.base_layer
    x = torch.randn(1, 5, 64, requires_grad=True)
    layer(x).square().sum().backward()
    dense = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(dense, packed_weight(layer).values(), layer.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, dense.grad)


def test_the_adapter_and_what_isnt_quantised_keep_their_dtypes(tiny_model, tmp_path) -> None:
    """The adapter stays float32 (TRL rounds it to bfloat16). Norms stay in the policy's dtype, as in TRL."""
    model = policy_of(tiny_model, tmp_path, NF4, dtype="bfloat16").model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model.dtype == lora.unwrap(model).model.norm.weight.dtype == torch.bfloat16
    layer = lora.unwrap(model).model.layers[0].mlp.up_proj.base_layer
    assert layer.compute_dtype == torch.bfloat16 == packed_weight(layer).values().dtype


# -- bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_knows_what_is_quantised_before_anything_is_loaded(kind, tiny_model, tmp_path) -> None:
    sketch = loading.outline(str(tiny_model), torch.float32)
    to_pack = loading.to_pack(sketch, KINDS[kind])
    planned = PolicySizes.of(loading.with_adapter(sketch, adapter()), "adamw_torch", 4, to_pack)
    loaded = PolicySizes.of(policy_of(tiny_model, tmp_path, KINDS[kind]).model, "adamw_torch", 4)
    assert planned == loaded
    whole = PolicySizes.of(
        loading.with_adapter(loading.outline(str(tiny_model), torch.float32), adapter()), "adamw_torch", 4
    )
    assert planned.elements == whole.elements and planned.trained == whole.trained and planned.block == whole.block
    one = large.on_each_rank("none", planned, 1, engine_itemsize=4, served=True)
    assert one.engine_weights == 4 * (whole.elements - planned.packed_elements) and one.policy_weights == planned.packed
    both = large.on_each_rank("none", planned, 1, engine_itemsize=4)
    assert (
        both.engine_weights == 4 * whole.elements
        and both.policy_weights == planned.packed > 0 == large.on_each_rank("none", whole, 1).policy_weights
    )


def test_the_plan_s_command_takes_a_quantised_base(tiny_model, capsys) -> None:
    arguments = ["plan", "--model", str(tiny_model), "--gpus", "1", "--gpu-memory", "24", "--bits", "4"]
    assert cli.main(arguments) == 2
    assert "--bits is 4, but a quantised base needs an adapter to train" in capsys.readouterr().err
    assert cli.main([*arguments, "--lora-rank", "4"]) == 0
    assert "on a quantised base of" in capsys.readouterr().out


# -- settings


def test_the_recipe_s_fields_are_those_of_trl() -> None:
    assert ModelConfig().init_kwargs() == {}
    assert ModelConfig(load_in_8bit=True).init_kwargs() == {"quantization_config": INT8}
    asked = ModelConfig(load_in_4bit=True, use_bnb_nested_quant=True, bnb_4bit_quant_storage="bfloat16").init_kwargs()
    assert asked == {"quantization_config": {**NESTED, "bnb_4bit_quant_storage": "bfloat16"}}
    with pytest.raises(ValueError, match=r"load_in_8bit and load_in_4bit are both true.*remove one"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)
    with pytest.raises(ValueError, match=r"`bnb_4bit_quant_type` 'int4'.*nf4, fp4"):
        ModelConfig(bnb_4bit_quant_type="int4")


def test_products_are_in_the_policy_s_precision_unless_it_is_said(tmp_path) -> None:
    assert quantized.asked_for(config(tmp_path, NF4, "bfloat16"), "x")["bnb_4bit_compute_dtype"] == "bfloat16"
    said = {**NF4, "bnb_4bit_compute_dtype": "float32"}
    assert quantized.asked_for(config(tmp_path, said, "bfloat16"), "x")["bnb_4bit_compute_dtype"] == "float32"
    old = config(tmp_path, model_init_kwargs={"load_in_8bit": True})
    assert quantized.asked_for(old, "x") == {"quant_method": "bitsandbytes", **INT8}


def written(folder: Path, settings: dict[str, Any]) -> str:
    """A model's configuration, without weights."""
    LlamaConfig(quantization_config=settings).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "torchao"])
def test_other_methods_are_refused_from_the_configuration_alone(method, tmp_path) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match=rf"has quant_method '{method}', but .*bitsandbytes.*load_in_4bit: true"):
        check_supported(written(tmp_path, {"quant_method": method}), config(tmp_path / "run"), adapter())
    assert time.process_time() - started < 5


def as_published(tmp_path: Path) -> Path:
    """A tiny gpt-oss with its experts in MXFP4: 32 values to a scale, two of them to a byte."""
    folder = tiny.make_model(tmp_path / "published", "gpt_oss")
    weights, packed = load_file(folder / "model.safetensors"), {}
    for name, value in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = value
            continue
        experts, inner, outer = value.shape
        packed[f"{name}_blocks"] = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 123, dtype=torch.uint8)
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_published_gpt_oss_refusal_shows_working_conversion_code(tmp_path, capsys) -> None:
    published, copy = as_published(tmp_path), tmp_path / "copy"
    with pytest.raises(ValueError, match=r"'mxfp4', as gpt-oss is published.*write a copy in bfloat16") as refusal:
        check_supported(str(published), config(tmp_path / "run"))
    assert cli.main(["plan", "--model", str(published), "--gpus", "1", "--gpu-memory", "80"]) == 2
    assert str(refusal.value) in capsys.readouterr().err
    code = re.search(r"AutoModelForCausalLM\..*?, save_original_format=False\)", str(refusal.value))
    assert code is not None
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "Mxfp4Config": Mxfp4Config}
    exec(code.group(), names | {"NAME": published, "FOLDER": copy})
    theirs = AutoModelForCausalLM.from_pretrained(
        published, quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16"
    )
    ours = AutoModelForCausalLM.from_pretrained(copy)
    assert ours.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    check_supported(str(copy), config(tmp_path / "run"))


def test_what_a_quantised_base_cant_do_is_said_with_the_remedy(tiny_model, tmp_path) -> None:
    packed = written(tmp_path / "packed", {"quant_method": "bitsandbytes", **NF4})
    cases: list[tuple[str, Any, Any, str]] = [
        (packed, config(tmp_path), None, r"quantised to 4 bits.*use_peft: true"),
        (str(tiny_model), config(tmp_path, INT8), None, r"quantised to 8 bits.*use_peft: true"),
        (packed, config(tmp_path, INT8), adapter(), r"requests int8, but .* NF4 already: remove"),
        (str(tiny_model), config(tmp_path, {"quant_method": "gptq", "bits": 4}), adapter(), r"quant_method 'gptq'"),
        (str(tiny_model), config(tmp_path, {**NF4, **INT8}), adapter(), r"4 and 8 bits.*set either"),
        (str(tiny_model), config(tmp_path, {**INT8, "llm_int8_has_fp16_weight": True}), adapter(), "remove llm_int8"),
        (
            str(tiny_model),
            config(tmp_path, NF4, torch_compile=True),
            adapter(),
            r"torch_compile is true.*remove torch_compile",
        ),
    ]
    for model, args, lora_config, said in cases:
        with pytest.raises(ValueError, match=said):
            check_supported(model, args, lora_config)
    check_supported(packed, config(tmp_path), adapter())
    check_supported(packed, config(tmp_path, NF4), adapter())


def test_a_missing_package_is_named(tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"needs bitsandbytes, which can't be imported.*pip install bitsandbytes"):
        check_supported(str(tiny_model), config(tmp_path, NF4), adapter())


def test_a_quantised_head_is_refused(tiny_qwen, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"head is quantised.*llm_int8_skip_modules"):
        policy_of(tiny_qwen, tmp_path, {**NF4, "llm_int8_skip_modules": ["nothing"]})


def test_the_trainer_s_argument_is_taken_as_in_trl(tiny_model, tmp_path) -> None:
    from transformers import BitsAndBytesConfig

    args = config(tmp_path)
    given = functools.partial(SimpleNamespace, model=str(tiny_model))
    quantized.take_quantization(given(quantization_config=BitsAndBytesConfig(**NF4)), args)
    assert args.model_init_kwargs["dtype"] == "float32" and quantized.asked_for(args, "x")["load_in_4bit"]
    json.dumps(args.to_dict())
    with pytest.raises(ValueError, match=r"given to the trainer and in model_init_kwargs"):
        quantized.take_quantization(given(quantization_config=NF4), args)
    with pytest.raises(ValueError, match=r"the model is an object"):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        quantized.take_quantization(given(model=model, quantization_config=NF4), args)

"""LoRA with the real engine: only the adapter is sent, or a merge where vLLM can't serve the adapter."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import lora_cases
import peft
import plain_vllm
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from colograd import GRPOTrainer
from colograd.engine import arguments
from colograd.engine.sampling import Sampling
from colograd.engine.vllm_engine import StaleWeights
from colograd.extensions.lora.weights import AdapterWeights
from colograd.policy.lora import adapted_layers, unwrap
from colograd.weights import proof
from colograd.weights.sync import MergedWeights

pytestmark = pytest.mark.engine

ALL_LINEAR = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"}


def make_trainer(model: Any, folder: Path, cls: type = GRPOTrainer, lora: Any = ALL_LINEAR, **changes: Any) -> Any:
    config = None if lora is None else peft.LoraConfig(**lora)
    args = tiny.config(folder, **({"learning_rate": 1e-2, "max_steps": 3} | changes))
    return cls(model, tiny.vowels, args, tiny.prompts(), peft_config=config)


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def base_bytes(trainer: Any) -> tuple[str, str]:
    """Hashes of the frozen weights in the policy and of the engine's weights."""
    return digest(p for p in trainer.model.parameters() if not p.requires_grad), digest(
        trainer.engine.model.parameters()
    )


def adapter_of(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


def mismatch(trainer: Any) -> list[float]:
    """Mean difference of the sampler's and the trainer's log-probabilities in nats, step by step."""
    name = "sampling/sampling_logp_difference/mean"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 40)[None]).logits


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory) -> Any:
    """Three steps of LoRA on every linear layer, with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("adapter") / "run"
    trainer = make_trainer(str(tiny_model), folder, lora_cases.Counting, save_strategy="steps", save_steps=2)
    trainer.before = base_bytes(trainer)
    trainer.train()
    trainer.save_model(str(folder))
    yield trainer
    trainer.close()


def test_sampler_and_trainer_agree_with_a_trained_adapter(trained, tried) -> None:
    assert isinstance(trained.weights, AdapterWeights)
    assert all(layer.lora_b.abs().max() > 1e-3 for layer in adapted_layers(trained.model))
    differences = mismatch(trained)
    assert len(differences) == 3 and max(differences) < 1e-5, differences
    tried("llama", "lora_served")


def test_a_publish_moves_the_adapters_bytes_alone(trained) -> None:
    adapter = sum(p.numel() * p.element_size() for p in trained.model.parameters() if p.requires_grad)
    assert trained.moved == [adapter] * 3, "the base is one memory with the engine's"
    storages = {p.untyped_storage().data_ptr() for p in trained.engine.model.parameters()}
    base = [p for p in trained.model.parameters() if not p.requires_grad]
    assert base and {p.untyped_storage().data_ptr() for p in base} <= storages
    assert f"weights: adapter, {len(trained.weights.slots)} tensors" in trained.weights.describe()
    trainable = [p for p in trained.model.parameters() if p.requires_grad]
    assert set(trained.optimizer.state) == set(trainable), "nothing but the adapter is optimised"


def test_base_is_bit_equal_after_100_publishes(trained) -> None:
    for version in range(100):
        trained.weights.publish(version)
    assert base_bytes(trained) == trained.before
    assert trained.weights.differing() == []


def test_ranks_beyond_the_adapters_stay_zero(trained) -> None:
    trained.weights.publish(3)
    for slot in trained.weights.slots:
        stack = slot.stack.clone()
        assert max(stack.shape[-2:]) > 4 and stack.any()
        rows, columns = slot.source.shape
        stack[0, 0, :rows, :columns] = 0
        assert not stack.any(), slot.layer


def test_unpublished_adapter_is_named_and_never_sampled(trained) -> None:
    layer = adapted_layers(trained.model)[3]
    trained.weights.publish(3)
    kept = layer.lora_b.detach().clone()
    try:
        with torch.no_grad():
            layer.lora_b.add_(0.01)
        assert trained.weights.differing() == [f"{layer.name}.lora_B"]
        with pytest.raises(StaleWeights, match="call `publish`"):
            next(trained.engine.generate([trained.train_prompts[0, 0]], Sampling(2, 4, 1.0, {}), version=4, seed=0))
    finally:
        with torch.no_grad():
            layer.lora_b.copy_(kept)


def test_moved_slot_or_another_adapter_raises(trained) -> None:
    holder = trained.weights.slots[0].holder
    kept = holder.lora_b_stacked
    holder.lora_b_stacked = tuple(stack.clone() for stack in kept)
    with pytest.raises(RuntimeError, match=r"weights have moved.*lora_B"):
        trained.weights.publish(3)
    assert trained.engine.version is None, "nothing is sampled afterwards"
    holder.lora_b_stacked = kept
    manager = trained.engine.model.lora_manager
    manager.lora_index_to_id[0] = 2
    with pytest.raises(RuntimeError, match="removed the trainer's adapter"):
        trained.weights.publish(3)
    manager.lora_index_to_id[0] = 1
    trained.weights.publish(3)


def test_the_saved_adapter_is_peft_s(trained, tiny_model) -> None:
    folder = Path(trained.args.output_dir)
    assert (folder / "adapter_config.json").exists() and not (folder / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain = logits(base)
    loaded = logits(peft.PeftModel.from_pretrained(base, folder))
    assert (loaded - plain).abs().max() > 0.01
    torch.testing.assert_close(loaded, logits(trained.model), rtol=0, atol=1e-5)


def test_plain_vllm_serves_the_saved_adapter(trained, tiny_model, tmp_path) -> None:
    trained.publish()
    ids = list(range(1, 30))
    found = plain_vllm.prompt_logprobs(tiny_model, ids, tmp_path, adapter=Path(trained.args.output_dir))
    torch.testing.assert_close(found, trained.engine.prompt_logprobs(ids), rtol=0, atol=1e-4)


def test_resumed_run_ends_with_the_same_adapter(trained, tiny_model, tmp_path, tried) -> None:
    shutil.copytree(Path(trained.args.output_dir) / "checkpoint-2", tmp_path / "checkpoint-2")
    resumed = make_trainer(str(tiny_model), tmp_path, save_strategy="steps", save_steps=2)
    try:
        resumed.train(resume_from_checkpoint=True)
        assert [e["step"] for e in resumed.state.log_history if "reward" in e] == [1, 2, 3]
        for ours, theirs in zip(adapter_of(resumed), adapter_of(trained), strict=True):
            assert torch.equal(ours, theirs), "counted once"
        assert base_bytes(resumed) == trained.before
    finally:
        resumed.close()
    tried("llama", "resumed")


@pytest.fixture
def probed(monkeypatch) -> list[str]:
    """Names of the parameters that `check_read` proves to be read by the engine."""
    names: list[str] = []
    check_read = proof.check_read

    def recorded(slices: Any, *others: Any, **named: Any) -> Any:
        names.extend(part.name for part in slices)
        return check_read(slices, *others, **named)

    monkeypatch.setattr(proof, "check_read", recorded)
    return names


@pytest.mark.slow
def test_dora_is_merged_only_in_the_engine(tiny_model, tmp_path, capfd, probed, tried) -> None:
    trainer = make_trainer(
        str(tiny_model), tmp_path, lora_cases.Counting, ALL_LINEAR | {"use_dora": True, "modules_to_save": ["norm"]}
    )
    try:
        assert isinstance(trainer.weights, MergedWeights) and not trainer.engine.tensors.lora_layers()
        said = capfd.readouterr().out
        assert (
            "vLLM doesn't serve DoRA, modules_to_save (input_layernorm, norm, post_att" in said
            and "weights: copied" in said
        )
        assert len(probed) == 14 + 5, "what is written later on is shown to be read"
        before, _ = base_bytes(trainer)
        trainer.train()
        trainer.publish()
        assert base_bytes(trainer)[0] == before
        assert max(mismatch(trainer)) < 1e-5
        adapted = sum(layer.module.get_base_layer().weight.numel() for layer in adapted_layers(trainer.model))
        assert trainer.moved[1:] == [4 * (adapted + 5 * 64)] * 3, "untouched weights go along once"
        merged = trainer.model.merge_and_unload()
        norm = dict(trainer.engine.model.named_parameters())["model.norm.weight"]
        assert torch.equal(norm, merged.model.norm.weight)
        down = dict(trainer.engine.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
        torch.testing.assert_close(down, merged.model.layers[1].mlp.down_proj.weight.detach(), rtol=0, atol=1e-5)
    finally:
        trainer.close()
    tried("llama", lora_merged="DoRA")


@pytest.mark.slow
def test_adapter_folder_resumes_in_bfloat16_without_vllm_lora(trained, tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(arguments, "serves_lora", lambda *args: False)
    trainer = make_trainer(
        trained.args.output_dir, tmp_path, lora=None, max_steps=1, model_init_kwargs={"dtype": "bfloat16"}
    )
    try:
        assert "vLLM has no LoRA slot for 14 adapted layers" in trainer.weights.describe()
        for ours, theirs in zip(adapter_of(trainer), adapter_of(trained), strict=True):
            assert torch.equal(ours, theirs)
        trainer.train()
        assert mismatch(trainer)[0] < 0.05 and trainer.args.optim == "adamw_split"
    finally:
        trainer.close()


def test_peft_model_with_some_projections_and_biases(tiny_qwen, tmp_path, tried) -> None:
    """The adapter covers q and v of a fused qkv, with a nonzero B. Slots hold A and the scaled B, rounded once."""
    base = AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype=torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=6, lora_alpha=7, use_rslora=True, rank_pattern={"v_proj": 9}))
    with torch.no_grad():
        for layer in adapted_layers(model):
            layer.lora_b.normal_(std=0.1)
    changes = {"model_init_kwargs": None, "weights": "adapter", "gradient_checkpointing": True}
    trainer = make_trainer(model, tmp_path, lora=None, max_steps=2, **changes)
    try:
        assert trainer.model is model and unwrap(trainer.model) is base
        assert {slot.part for slot in trainer.weights.slots} == {0, 2}, "k has none"
        slot = next(slot for slot in trainer.weights.slots if slot.kind == "lora_B")
        assert torch.equal(slot.destination, (slot.source.detach() * (7 / 6**0.5)).bfloat16())
        trainer.train()
        assert max(mismatch(trainer)) < 0.05, mismatch(trainer)
    finally:
        trainer.close()
    tried("qwen2", "lora_served")


@pytest.mark.slow  # the test above has an untied model
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families_agree_with_their_sampler_too(family, tmp_path, probed, tried) -> None:
    model = tiny.make_model(tmp_path / "model", family)
    trainer = make_trainer(str(model), tmp_path / "run", max_steps=2)
    try:
        assert isinstance(trainer.weights, AdapterWeights)
        assert probed == [], "a base that is equal and stays so needs no more proof"
        trainer.train()
        assert max(mismatch(trainer)) < 1e-5, "with an adapter that does something in the second step"
    finally:
        trainer.close()
    tried(family, "lora_served")


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (None, r"`weights` is 'adapter', but the policy is trained without a LoRA adapter.*use_peft: true"),
        (ALL_LINEAR | {"use_dora": True}, r"`weights` is 'adapter', but vLLM doesn't serve DoRA: set `weights: auto`"),
    ],
)
def test_impossible_choice_fails_before_the_build(tiny_model, tmp_path, lora, said) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer(str(tiny_model), tmp_path, lora=lora, weights="adapter")

"""LoRA policies without an engine: the adapted layers, the adapter's effect, the refusals."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import lora_cases
import peft
import pytest
import saved_tensors
import tiny
import torch
from transformers import AutoModelForCausalLM

from colograd.config import ModelConfig, parse_arguments
from colograd.extensions.lora.adapters import keep_inputs_as_they_are, take_adapter
from colograd.policy import lora, row_proof
from colograd.policy.loading import load_policy


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def adapted(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A PeftModel with a random B, because a fresh adapter's B is zero and has no effect."""
    model = lora.wrap(load(folder, dtype), peft.LoraConfig(**({"r": 4, "target_modules": "all-linear"} | changes)), 0)
    return lora_cases.doing_something(model)


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_packed_rows_of_an_adapted_model_equal_padded_ones(tiny_model, changes) -> None:
    model = adapted(tiny_model, **changes)
    plain = lora_cases.gradients(load(tiny_model), True)[0]
    assert row_proof.choose_rows(model) == ""
    packed = lora_cases.gradients(model, share_prompts=True)
    assert (packed[0] - plain).abs().mean() > 0.05, "the adapter does something"
    lora_cases.check_rows_agree(model, packed)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_reentrant_checkpoints_give_the_same_gradients(tiny_model, tmp_path) -> None:
    """The first layer's input needs no gradient, so without help a reentrant checkpoint gives the adapter none."""
    found = []
    for reentrant in (False, True):
        args = tiny.config(
            tmp_path,
            model_init_kwargs=None,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        model = load_policy(adapted(tiny_model), None, args).model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        found.append(lora_cases.gradients(model, share_prompts=True)[1])
    assert all(ours.any() for ours in found[0])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 5}},
        {"use_dora": True},
        {"target_modules": ["embed_tokens", "v_proj"]},
    ],
    ids=lambda changes: "-".join(changes) or "lora",
)
def test_a_layer_amounts_to_what_peft_merges(tiny_qwen, changes) -> None:
    model = adapted(tiny_qwen, **changes)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = {layer.name: layer.merged() for layer in lora.adapted_layers(model)}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "the policy is left alone"
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    for name, weight in found.items():
        torch.testing.assert_close(weight, merged[f"{name}.weight"].detach(), rtol=1e-5, atol=1e-5)


def test_logits_come_from_the_fully_trained_head(tiny_qwen) -> None:
    model = adapted(tiny_qwen, modules_to_save=["lm_head"])
    ((name, copied),) = lora.trained_copies(model)
    assert name == "lm_head.weight"
    with torch.no_grad():
        copied.mul_(0.5)
    assert row_proof.choose_rows(model) == "", "proved against the model's own logits"
    lora_cases.gradients(model, share_prompts=True)
    assert copied.grad is not None and copied.grad.any()


def test_names_lose_what_peft_and_vllm_add() -> None:
    names = {
        "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight": "model.layers.0.mlp.up_proj.weight",
        "base_model.model.lm_head.original_module.weight": "lm_head.weight",
        "model.layers.0.self_attn.qkv_proj.base_layer.bias": "model.layers.0.self_attn.qkv_proj.bias",
        "model.norm.weight": "model.norm.weight",
        "base_model.model.lm_head.modules_to_save.default.weight": None,
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight": None,
        "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector.default.weight": None,
    }
    assert {name: lora.base_name(name) for name in names} == names


def test_new_adapter_depends_on_the_seed_alone(tiny_model) -> None:
    """Ranks draw different numbers before they get here, but must start from the same adapter."""
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        model = lora.wrap(load(tiny_model), peft.LoraConfig(target_modules="all-linear"), seed=7)
        assert torch.equal(before, torch.get_rng_state())
        found.append([layer.lora_a for layer in lora.adapted_layers(model)])
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*found, strict=True))


def test_what_vllm_does_not_serve_is_named(tiny_qwen) -> None:
    def why(**changes: Any) -> str:
        return take_adapter(adapted(tiny_qwen, **changes)).why_merged

    assert why() == why(rank_pattern={"q_proj": 8}) == why(use_rslora=True) == ""
    assert why(use_dora=True) == "vLLM doesn't serve DoRA"
    assert why(bias="all") == "vLLM doesn't serve bias: all"
    assert why(modules_to_save=["lm_head"]) == "vLLM doesn't serve modules_to_save (lm_head)"
    assert why(r=600, target_modules=["q_proj"]) == "vLLM doesn't serve rank 600, over 512"
    assert why(target_modules=["embed_tokens"]) == "vLLM doesn't serve a LoRA on embed_tokens"
    found = take_adapter(adapted(tiny_qwen, target_modules=["q_proj", "down_proj"], rank_pattern={"q_proj": 9}))
    assert (found.name, found.rank, found.targets) == ("default", 9, ("down_proj", "q_proj"))


def with_two(model: Any) -> Any:
    model.add_adapter("second", peft.LoraConfig(target_modules="all-linear"))
    return model


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


def unfrozen(model: Any) -> Any:
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


REFUSED = {
    "two adapters": (lambda f: with_two(adapted(f)), "default, second", "exactly one", "delete_adapter"),
    "a merged adapter": (lambda f: merged(adapted(f)), "q_proj", "merged into the base", "unmerge_adapter"),
    "a frozen adapter": (lambda f: frozen(adapted(f)), "isn't trainable", "load it", "is_trainable=True"),
    "a trained norm": (
        lambda f: unfrozen(adapted(f)),
        "model.norm.weight is trainable",
        "peft saves only",
        "freeze it",
    ),
    "the head": (lambda f: adapted(f, target_modules=["lm_head"]), "head", "in tiles", "remove the head"),
    "tied embeddings": (
        lambda f: adapted(f, target_modules=["embed_tokens"]),
        "model.embed_tokens",
        "one tensor",
        "remove both",
    ),
    "a tied head that is trained whole": (
        lambda f: adapted(f, modules_to_save=["lm_head"]),
        "lm_head.weight",
        "one tensor",
        "lora_modules_to_save",
    ),
    "a start that edits the base": (
        lambda f: adapted(f, init_lora_weights="olora"),
        "'olora'",
        "change the base's weights",
        "set init_lora_weights to one of True",
    ),
    "a bias of the adapter": (lambda f: adapted(f, lora_bias=True), "lora_bias", "can't be published", "remove it"),
    "no such layer": (lambda f: adapted(f, target_modules=["wq"]), "wq", "can't adapt", "set lora_target_modules"),
    "another method": (
        lambda f: lora.wrap(load(f), peft.IA3Config(), 0),
        "IA3Config",
        "only LoRA",
        r"give peft.LoraConfig",
    ),
    "no configuration": (
        lambda f: lora.wrap(load(f), {"r": 4}, 0),
        "dict",
        "peft configuration",
        "give peft.LoraConfig",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untrainable_adapter_error_names_value_rule_and_remedy(tiny_model, name) -> None:
    make, *parts = REFUSED[name]
    with pytest.raises(ValueError) as raised:
        take_adapter(make(tiny_model))
    for part in parts:
        assert re.search(part, str(raised.value)), f"{part!r} isn't in: {raised.value}"
    assert "\n" not in str(raised.value)


# -- how a policy gets its adapter


def test_the_recipes_fields_make_peft_s_configuration(tmp_path) -> None:
    assert ModelConfig(lora_r=8).peft_config() is None, "without use_peft they say nothing"
    made = ModelConfig(
        use_peft=True, lora_r=8, lora_alpha=4, lora_dropout=0.0, use_rslora=True, lora_target_modules=["all-linear"]
    ).peft_config()
    assert (made.r, made.lora_alpha, made.lora_dropout, made.use_rslora) == (8, 4, 0.0, True)
    assert made.target_modules == "all-linear" and made.task_type == "CAUSAL_LM" and made.bias == "none"
    assert ModelConfig(use_peft=True, lora_target_modules=["q_proj"]).peft_config().target_modules == {"q_proj"}
    assert ModelConfig(use_peft=True).peft_config().target_modules is None, "peft's own for the architecture"
    for written in ("all-linear", "\n  - all-linear"):
        (tmp_path / "lora.yaml").write_text(f"use_peft: true\nlora_target_modules: {written}\n")
        *_, read, _ = parse_arguments(["--config", str(tmp_path / "lora.yaml"), "--output_dir", str(tmp_path)])
        assert read.peft_config().target_modules == "all-linear"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_peft": True, "lora_r": 0}, r"`lora_r` is 0.*at least 1"),
        ({"use_peft": True, "lora_dropout": 1.0}, r"`lora_dropout` is 1.0.*\[0, 1\)"),
        ({"use_peft": True, "lora_task_type": "SEQ_CLS"}, r"'SEQ_CLS'.*CAUSAL_LM"),
    ],
)
def test_settings_that_make_no_adapter(settings, said) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig(**settings)


def test_a_folder_with_an_adapter_alone_is_its_base_with_that_adapter(tiny_model, tmp_path) -> None:
    model, folder = adapted(tiny_model), str(tmp_path / "adapter")
    model.save_pretrained(folder)
    found = load_policy(folder, None, tiny.config(tmp_path))
    assert found.path == str(tiny_model) and found.adapter is not None and found.adapter.rank == 4 and found.untouched
    for ours, theirs in zip(lora.adapted_layers(found.model), lora.adapted_layers(model), strict=True):
        assert torch.equal(ours.lora_a, theirs.lora_a) and torch.equal(ours.lora_b, theirs.lora_b)
        assert ours.lora_a.requires_grad and ours.lora_b.requires_grad
    trainable = {name for name, p in found.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trainable)
    with pytest.raises(ValueError, match=r"holds an adapter, but use_peft .* requests a new one.*remove use_peft"):
        load_policy(folder, None, tiny.config(tmp_path), peft.LoraConfig())


def test_peft_model_is_kept_and_other_adapters_refused(tiny_model, tmp_path) -> None:
    model, args = adapted(tiny_model), tiny.config(tmp_path, model_init_kwargs=None)
    found = load_policy(model, None, args)
    assert found.model is model and found.path == str(tiny_model) and not found.untouched
    with pytest.raises(ValueError, match=r"is a PeftModel and peft_config is set.*Remove peft_config"):
        load_policy(model, None, args, peft.LoraConfig())
    own = load(tiny_model)
    own.add_adapter(peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match=r"transformers' own \(add_adapter\).*PeftModel.from_pretrained"):
        load_policy(own, None, args)


def test_a_bfloat16_policy_trains_its_adapter_in_float32(tiny_model, tmp_path) -> None:
    args = tiny.config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    found = load_policy(str(tiny_model), None, args, peft.LoraConfig(target_modules="all-linear"))
    assert {p.dtype for p in found.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in found.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert found.model.dtype == torch.bfloat16


def test_float32_adapter_keeps_one_bfloat16_input_per_layer(tiny_model) -> None:
    """Results have the same bits. A copied model computes with its own weights, and DoRA computes as in peft."""
    model = adapted(tiny_model, torch.bfloat16).train()
    row_proof.choose_rows(model)
    theirs, before = (
        lora_cases.gradients(model, True),
        saved_tensors.kept(model, lambda: lora_cases.logprobs(model, True)),
    )
    keep_inputs_as_they_are(model)
    ours, now = lora_cases.gradients(model, True), saved_tensors.kept(model, lambda: lora_cases.logprobs(model, True))
    assert torch.equal(ours[0], theirs[0]) and all(map(torch.equal, ours[1], theirs[1]))
    assert now < 0.75 * before
    second = copy.deepcopy(model)
    for layer in lora.adapted_layers(second):
        layer.lora_a.data.zero_()
    assert torch.equal(lora_cases.logprobs(model, True), ours[0]) and not torch.equal(
        lora_cases.logprobs(second, True), ours[0]
    )
    of_dora = adapted(tiny_model, torch.bfloat16, use_dora=True)
    keep_inputs_as_they_are(of_dora)
    assert all(layer.module.cast_input_dtype_enabled for layer in lora.adapted_layers(of_dora))

"""Quantised bases of vision-language models: policy and engine have equal values of quantised and plain parts, only the
adapter is trained, and saved models give the engine's log-probabilities."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_cases
import lora_cases
import peft
import plain_vllm
import pytest
import quantized_cases
import tiny
import tiny_images
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

from colograd.apps import cli
from colograd.batch import ModelInput
from colograd.extensions.images import towers as images
from colograd.extensions.images.data import ImageReader
from colograd.extensions.images.model import Tower
from colograd.extensions.lora.weights import AdapterWeights
from colograd.extensions.quantized import checkpoints as quantized
from colograd.extensions.quantized.layers import packed_weights, settle
from colograd.memory.description import PolicySizes
from colograd.policy import loading, row_proof
from colograd.policy.loading import load_policy
from colograd.policy.lora import base_name, wrap
from colograd.policy.supported import check_supported
from colograd.weights import proof
from colograd.weights.sync import MergedWeights

pytest.importorskip("bitsandbytes")

KINDS = quantized_cases.KINDS
TEXT = r".*(language|text)_model.*\.(q|v|gate)_proj"  # of the language model alone
GEMMA3, OTHERS = image_cases.GEMMA3, image_cases.OTHERS


WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 128}  # of a tower: no row of a matrix ends within a block


SKIPPED = ["lm_head", "model.visual", "model.vision_model", "model.vision_tower"]


def adapter(targets: Any = TEXT, **changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **changes)


def build(model: Path, folder: Path, kind: str | None, lora: Any = None, **changes: Any) -> lora_cases.Counting:
    args = quantized_cases.config(folder, None if kind is None else KINDS[kind], **changes)
    return lora_cases.Counting(
        str(model), tiny.vowels, args, tiny_images.prompts(8, images=2), peft_config=lora or adapter()
    )


def towers(weights: dict[str, Any]) -> list[str]:
    return [name for name in weights if images.in_tower(name)]


def asked_of(trainer: Any) -> ModelInput:
    row = tiny_images.prompts(2, images=2)[1]
    reader = ImageReader(trainer.policy.processor, trainer.policy.image_token)
    return reader.read(row, {"add_generation_prompt": True}, "row 1")


# -- runs

SETTINGS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "beta": 0.1, **tiny.ONE_BY_ONE}


@pytest.mark.slow  # the tests below have its rows, test_quantized.py a run of text
@pytest.mark.engine
@pytest.mark.parametrize("family", ["idefics3", GEMMA3, *OTHERS])
def test_a_family_trains_an_adapter_on_a_base_of_4_bits(
    family: str, tmp_path: Path, tried: Callable[..., None], closing: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three steps with a KL term. The base's values stay bit-equal in policy and engine, a publish copies the adapter
    only, a resumed run has the same bits, and saved and exported models give equal log-probabilities."""
    model = tiny_images.make_model(tmp_path / "model", family, vision=WHOLE_BLOCKS)
    trainer = closing(build(model, tmp_path / "run", "NF4", **SETTINGS))
    packed = packed_weights(trainer.model)
    assert towers(packed) and len(towers(packed)) < len(packed)
    assert isinstance(trainer.weights, AdapterWeights)
    assert f"{len(packed)} matrices" in trainer.weights.describe()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    quantized_cases.same_on_both_sides(trainer)
    assert all(torch.equal(trainer.model.get_parameter(name), value) for name, value in before.items())
    assert trainer.moved[1:] == [quantized_cases.adapter_bytes(trainer)] * 2
    assert [step["kl"] > 0 for step in quantized_cases.steps(trainer)] == [False, True, True]
    check_values(trainer)

    trainer.publish()
    again = closing(build(model, tmp_path / "again", "NF4", **(SETTINGS | {"save_strategy": "no"})))
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    ours, theirs = (image_cases.weights_after(of) for of in (trainer, again))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())

    check_saved(trainer, tmp_path / "run" / "checkpoint-3")
    policy = load_policy(str(tmp_path / "run" / "checkpoint-3"), None, quantized_cases.config(tmp_path / "run"))
    assert policy.quantization.name == "NF4" and policy.processor is not None
    assert all(torch.equal(policy.model.get_parameter(name), value) for name, value in ours.items())
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert "the NF4 base's values and the adapter" in capfd.readouterr().out
    check_exported(trainer, tmp_path / "exported", tmp_path if family != "idefics3" else None)
    tried(family, "qlora")


def check_values(trainer: Any) -> None:
    """The engine's tower has the values that bitsandbytes dequantises, and they differ from the checkpoint's values."""
    whole = AutoModelForImageTextToText.from_pretrained(trainer.policy.path).state_dict()
    places = {part.name: part for part in trainer.weights.base.slices if part.packed is not None}
    for name in towers(places)[:4]:
        held, loaded = places[name].packed.values(), whole[str(base_name(name))]
        assert torch.equal(places[name].destination, held)
        assert 0.05 < float((held - loaded).norm() / loaded.norm()) < 0.11


def check_saved(trainer: Any, saved: Path, as_it_is: bool = True) -> None:
    """Load as the model card shows, with transformers and peft, and compare log-probabilities with the engine's.

    Args:
        as_it_is: compare bitsandbytes' CPU kernels too. Without gradients some of them round to bfloat16.
    """
    settings, dtype = quantized.beside(saved)
    card = (saved.parent / "README.md").read_text() if (saved.parent / "README.md").exists() else ""
    assert not card or "AutoModelForImageTextToText.from_pretrained(" in card
    asked, completion = asked_of(trainer), list(range(40, 52))
    theirs = trainer.engine.prompt_logprobs(asked.followed_by(completion))[-12:]
    loaded = AutoModelForImageTextToText.from_pretrained(
        trainer.policy.path, quantization_config=BitsAndBytesConfig.from_dict(settings), dtype=dtype
    )
    loaded = peft.PeftModel.from_pretrained(loaded, saved).eval()
    if as_it_is:
        ours = image_cases.logprobs_of_transformers(copy.deepcopy(loaded), asked, completion)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)
    settle(loaded.get_base_model())
    ours = image_cases.logprobs_of_transformers(loaded, asked, completion)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def check_exported(trainer: Any, folder: Path, scratch: Path | None) -> None:
    """The export is a plain model with its processor and the base checkpoint's names. Its log-probabilities in
    transformers and, given ``scratch``, in vLLM equal the engine's."""
    from safetensors import safe_open

    names = [{*safe_open(file / "model.safetensors", "pt").keys()} for file in (folder, Path(trainer.policy.path))]
    assert names[0] == names[1]
    assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")
    AutoProcessor.from_pretrained(folder)
    asked, completion = asked_of(trainer), list(range(40, 52))
    reads = asked.followed_by(completion)
    theirs = trainer.engine.prompt_logprobs(reads)[-12:]
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    ours = image_cases.logprobs_of_transformers(plain, asked, completion)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    base = AutoModelForImageTextToText.from_pretrained(trainer.policy.path)
    assert float((image_cases.logprobs_of_transformers(base, asked, completion) - theirs).abs().mean()) > 1e-3
    if scratch is not None:
        pictures = tiny_images.prompts(2, images=2)[1]["images"]
        found = plain_vllm.prompt_logprobs(folder, reads.images.engine_ids, scratch, pictures=pictures)
        torch.testing.assert_close(found[-12:], theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["idefics3", "gemma3_vl", *OTHERS])
@pytest.mark.parametrize("kind", ["nested", "int8"])
def test_one_packed_base_serves_both_its_tower_too(
    family: str, kind: str, tmp_path: Path, tried: Callable[..., None], closing: Any
) -> None:
    model = tiny_images.make_model(tmp_path / "model", family)
    trainer = closing(build(model, tmp_path / "run", kind, weights="shared"))
    packed = packed_weights(trainer.model)
    served = {id(weight.layer) for weight in trainer.engine.served.weights}
    assert served == {id(weight.layer) for weight in packed.values()} and towers(packed)
    assert "one memory with the engine's" in trainer.weights.describe()
    trainer.train()
    quantized_cases.same_on_both_sides(trainer)
    assert trainer.moved == [quantized_cases.adapter_bytes(trainer)] * 3
    tried(family, "qlora")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["idefics3", "gemma3_vl", *OTHERS])
@pytest.mark.parametrize("kind", ["NF4", "int8"])
def test_an_adapter_on_the_tower_too_is_merged_on_its_way(family: str, kind: str, tmp_path: Path, closing: Any) -> None:
    """`all-linear` adapts the tower and the projector, which vLLM doesn't serve."""
    model = tiny_images.make_model(tmp_path / "model", family)
    trainer = closing(build(model, tmp_path / "run", kind, adapter("all-linear"), **(SETTINGS | {"save_steps": 3})))
    assert isinstance(trainer.weights, MergedWeights)
    assert "vLLM doesn't serve a LoRA on vision parts" in trainer.weights.describe()
    trainer.train()
    quantized_cases.same_on_both_sides(trainer)
    trainer.publish()
    check_saved(trainer, tmp_path / "run" / "checkpoint-3", as_it_is=False)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    check_exported(trainer, tmp_path / "exported", None)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["idefics3", "gemma3_vl", *OTHERS])
@pytest.mark.parametrize("skipped", [None, SKIPPED], ids=["all", "text"])
def test_a_packed_checkpoint_is_trained(family: str, skipped: list[str] | None, tmp_path: Path, closing: Any) -> None:
    """Packed checkpoints with or without a packed tower. vLLM gets all weights from the policy."""
    whole = tiny_images.make_model(tmp_path / "whole", family)
    settings = BitsAndBytesConfig(
        **KINDS["nested"], bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=skipped
    )
    packed = AutoModelForImageTextToText.from_pretrained(whole, quantization_config=settings, dtype=torch.float32)
    packed.save_pretrained(tmp_path / "packed")
    AutoProcessor.from_pretrained(whole).save_pretrained(tmp_path / "packed")
    trainer = closing(build(tmp_path / "packed", tmp_path / "run", None, **SETTINGS))
    assert trainer.policy.quantization.in_checkpoint and trainer.engine.blank
    assert bool(towers(packed_weights(trainer.model))) == (skipped is None)
    trainer.train()
    quantized_cases.same_on_both_sides(trainer)
    trainer.publish()
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    asked, completion = asked_of(trainer), list(range(40, 52))
    ours = image_cases.logprobs_of_transformers(
        AutoModelForImageTextToText.from_pretrained(tmp_path / "exported"), asked, completion
    )
    theirs = trainer.engine.prompt_logprobs(asked.followed_by(completion))[-12:]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["idefics3", "gemma3_vl", *OTHERS])
@pytest.mark.parametrize(
    ("sharding", "targets"),
    [("gradients", TEXT), ("gradients", "all-linear"), ("one engine", TEXT)],
    ids=["served", "merged", "one engine"],
)
def test_two_ranks_have_the_same_base_and_the_same_adapter(
    family: str, sharding: str, targets: str, tmp_path: Path
) -> None:
    quantized_cases.check_two_ranks(tiny_images.make_model(tmp_path / "model", family), tmp_path, sharding, targets)


@pytest.mark.slow
@pytest.mark.engine
def test_a_tower_that_holds_something_else_is_found_at_start(tmp_path: Path, closing: Any) -> None:
    model = tiny_images.make_model(tmp_path / "model", "idefics3")
    trainer = closing(build(model, tmp_path / "run", "NF4"))
    places = {part.name: part for part in trainer.weights.base.slices if part.packed is not None}
    part, seen = places[towers(places)[1]], asked_of(trainer)
    proof.check_same(trainer.model, trainer.engine, seen)
    with proof.changed(part.destination):
        proof.check_same(trainer.model, trainer.engine)
        with pytest.raises(RuntimeError, match=r"log-probabilities differ by \S+ nats on average after images"):
            proof.check_same(trainer.model, trainer.engine, seen)


# -- the policy


def loaded(family: str, kind: str, folder: Path, targets: Any = TEXT) -> tuple[Any, Any]:
    """Return a quantised model with an adapter, and the same model on the meta device, built from its configuration."""
    model, _ = tiny_images.random_model(family)
    model.save_pretrained(folder)
    arguments = quantized.load_arguments(KINDS[kind], torch.device("cpu"))
    found = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **arguments)
    settle(found)
    return wrap(found, adapter(targets), seed=0), loading.outline(str(folder), torch.float32)


@pytest.mark.parametrize("family", image_cases.but_slowly(tiny_images.FAMILIES))
def test_packed_and_padded_rows_give_one_loss_and_one_gradient(family: str, tmp_path: Path) -> None:
    model = lora_cases.doing_something(loaded(family, "NF4", tmp_path, "all-linear")[0])
    assert row_proof.choose_rows(model, asked=[tiny_images.made_up(model, family, 2)]) == ""
    groups = image_cases.groups_of(model, family)
    packed = image_cases.loss_and_gradients(model, groups, share=True)
    row_proof.set_attention(model.get_base_model(), "sdpa")
    padded = image_cases.loss_and_gradients(model, groups, share=False)
    image_cases.check_alike(packed, padded, by_size=5e-5)


@pytest.mark.parametrize("family", image_cases.but_slowly(tiny_images.FAMILIES))
def test_the_plan_knows_what_is_quantised_before_anything_is_loaded(family: str, tmp_path: Path) -> None:
    for kind in ("nested", "int8") if family == "idefics3" else ("nested",):
        model, sketch = loaded(family, kind, tmp_path / kind, "all-linear")
        to_pack = loading.to_pack(sketch, KINDS[kind])
        planned = PolicySizes.of(loading.with_adapter(sketch, adapter("all-linear")), "adamw_torch", 4, to_pack)
        assert planned == PolicySizes.of(model, "adamw_torch", 4) and planned.packed > 0
        assert Tower.of(model) is not None, "an adapter on it keeps its activations"
    if family == "idefics3":
        assert Tower.of(loaded(family, "nested", tmp_path / "text")[0]) is None, "what isn't trained keeps nothing"


def test_blocks_that_go_on_in_the_next_row_are_dequantised_too(tmp_path: Path) -> None:
    """Blocks continue in the next row, as in towers of width 4304. bitsandbytes' CPU kernel is wrong there."""
    model = loaded("idefics3", "NF4", tmp_path)[0]
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path)
    packed = packed_weights(model)
    broken = [name for name, weight in packed.items() if weight.needs_exact_products]
    assert broken and {*broken} <= {*towers(packed)} and len(broken) < len(towers(packed))
    for name, weight in packed.items():
        held, had = weight.values(), whole.get_parameter(str(base_name(name))).detach()
        assert float((held - had).norm() / had.norm()) < 0.11
        x = torch.randn(2, weight.shape[1])
        plain = torch.nn.functional.linear(x, held, weight.layer.bias)
        torch.testing.assert_close(weight.layer(x), plain)
        torch.testing.assert_close(weight.product(x), torch.nn.functional.linear(x, held))


def test_one_regular_expression_names_the_layers_of_the_language_model(tmp_path: Path) -> None:
    from colograd.config import ModelConfig

    def targets(*given: str) -> Any:
        return ModelConfig(use_peft=True, lora_target_modules=[*given]).peft_config().target_modules

    assert targets(TEXT) == TEXT and targets("all-linear") == "all-linear"
    assert targets("q_proj") == {"q_proj"} and targets("q_proj", "v_proj") == {"q_proj", "v_proj"}


def test_what_a_quantised_base_cant_do_is_said_from_the_configuration_alone(tmp_path: Path) -> None:
    model, _ = tiny_images.random_model("gemma3_vl")
    model.config.save_pretrained(tmp_path)
    check_supported(str(tmp_path), quantized_cases.config(tmp_path, KINDS["NF4"]), adapter())
    with pytest.raises(ValueError, match=r"quantised to 4 bits.*use_peft: true"):
        check_supported(str(tmp_path), quantized_cases.config(tmp_path, KINDS["NF4"]))
    model.config.quantization_config = {"quant_method": "awq"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has quant_method 'awq'.*bitsandbytes"):
        check_supported(str(tmp_path), quantized_cases.config(tmp_path), adapter())


def test_a_plan_of_a_quantised_base_is_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = tiny_images.random_model("idefics3")
    model.config.save_pretrained(tmp_path)
    arguments = ["plan", "--model", str(tmp_path), "--gpus", "1", "--gpu-memory", "1", "--context", "200"]
    assert cli.main([*arguments, "--lora-rank", "8", "--bits", "4", "--served"]) == 0
    assert re.search(r"on a quantised base of .* GiB", capsys.readouterr().out)

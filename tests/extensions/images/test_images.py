"""Images: the rows of a dataset, each family's log-probabilities in packed and padded rows, and runs with the real
vLLM, where torchvision is there."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import launcher
import pytest
import tiny
import tiny_images
import torch
from datasets import Dataset
from flash_kernels import flash_backward, flash_forward
from image_cases import (
    GEMMA3,
    OTHERS,
    PACKED,
    RANKS,
    check_alike,
    compare_with_what_was_saved,
    exact_model,
    groups_of,
    loss_and_gradients,
    own_inputs,
    weights_after,
)
from paths import RECIPES
from PIL import ExifTags, Image
from saved_tensors import kept

from colograd import GRPOTrainer
from colograd.apps import cli
from colograd.batch import ModelInput
from colograd.data.messages import text_of
from colograd.extensions.images import towers as images
from colograd.extensions.images.data import ImageReader, in_rgb, with_images
from colograd.extensions.images.engine.features import check_expanded
from colograd.extensions.images.model import Tower
from colograd.extensions.images.rider import Images
from colograd.extensions.lora.weights import AdapterWeights
from colograd.memory.shape import Lengths
from colograd.policy import attention, merged_attention, row_proof, towers
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack
from colograd.policy.supported import check_supported
from colograd.weights.sync import MergedWeights

WITH_PLACE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]


# -- data


def test_images_come_before_the_first_user_message_where_no_place_is_named() -> None:
    messages, found = with_images(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], ["a", "b"], "row"
    )
    assert [part["type"] for part in messages[1]["content"]] == ["image", "image", "text"] and found == ["a", "b"]
    assert messages[0]["content"] == [{"type": "text", "text": "s"}]


def test_conversations_become_what_trl_makes_of_them() -> None:
    from trl.data_utils import prepare_multimodal_messages

    for prompt in (WITH_PLACE, [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]):
        picture = tiny_images.picture(1)
        theirs = prepare_multimodal_messages(prompt, [picture])
        ours, found = with_images(prompt, [picture], "row")
        assert text_of(theirs) == ours and found == [picture]
    said = [{"role": "user", "content": ["see", {"type": "image", "image": picture, "text": None}]}]
    assert text_of(said)[0]["content"] == [{"type": "text", "text": "see"}, {"type": "image"}]


@pytest.mark.parametrize(
    ("prompt", "count", "said"),
    [
        (WITH_PLACE, 2, r"has 1 \{.type.: .image.\} part\(s\) .* 2 image\(s\)"),
        (WITH_PLACE, 0, r"has 1 \{.type.: .image.\} part\(s\) .* 0 image\(s\)"),
        ("text", 1, "plain text, but images need a conversation"),
    ],
)
def test_places_and_images_that_differ_in_number_are_refused(prompt: Any, count: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_images(prompt, [tiny_images.picture(0)] * count, "train, row 3")


def test_an_image_is_read_from_what_datasets_has(tmp_path: Path) -> None:
    picture = tiny_images.picture(3)
    picture.save(tmp_path / "p.png")
    content = (tmp_path / "p.png").read_bytes()
    for given in (picture, str(tmp_path / "p.png"), {"bytes": content, "path": None}, picture.convert("RGBA")):
        assert in_rgb(given, "row").tobytes() == picture.tobytes()
    with pytest.raises(ValueError, match="row 7: an image can't be read"):
        in_rgb(str(tmp_path / "missing.png"), "row 7")


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    """A photograph is rotated by its EXIF data in every kind of column, because `datasets.Image` rotates it too."""
    turned, path = Image.Exif(), str(tmp_path / "p.jpg")
    turned[ExifTags.Base.Orientation] = 6  # a quarter
    tiny_images.picture(3, 40, 20).save(path, exif=turned)
    column = Dataset.from_dict({"image": [path]}).cast_column("image", datasets.Image())[0]["image"]
    for given in (path, {"bytes": Path(path).read_bytes()}, Image.open(path)):
        assert in_rgb(given, "row").size == (20, 40) and in_rgb(given, "row").tobytes() == column.tobytes()


def test_a_prompt_has_the_tokens_of_its_images() -> None:
    """The engine's tokens have one placeholder per image."""
    model, tokenizer = tiny_images.random_model("gemma3_vl")
    reader = ImageReader(tiny_images.gemma3_processor(tokenizer), model.config.image_token_id)
    row = {"prompt": [{"role": "user", "content": "two"}], "images": [tiny_images.picture(1), tiny_images.picture(2)]}
    asked = reader.read(row, {"add_generation_prompt": True}, "row 0")
    assert asked.images is not None and len(asked.images.places) == 8 and reader.most_images == 2
    assert asked.images.engine_ids.count(tokenizer.boi_token_id) == 2
    assert asked == reader.read(row, {"add_generation_prompt": True}, "row 0")
    assert asked != reader.read(row | {"images": row["images"][::-1]}, {"add_generation_prompt": True}, "row 0")
    further = asked.followed_by([5, 6])
    assert further.ids[-2:] == (5, 6) and further.images is not None and further.images.engine_ids[-2:] == (5, 6)


def test_image_tokens_that_differ_in_number_are_an_error_that_names_both() -> None:
    asked = ModelInput((1, 9, 9, 2), Images("d", (1, 9, 2), (), {}, (1, 2)))
    check_expanded(asked, [1, 9, 9, 2])
    with pytest.raises(RuntimeError, match=r"5 prompt tokens \(3 image tokens\).*4 tokens with 2 image tokens"):
        check_expanded(asked, [1, 9, 9, 9, 2])


def test_what_is_not_built_is_refused_from_the_configuration_alone(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma4Config, Qwen2_5_VLConfig

    seeing, large = {"use_bidirectional_attention": "vision"}, {"default_output_length": 1120}
    for config, changes, said in (
        (Qwen2_5_VLConfig(), {"vllm_engine_kwargs": {"mm_processor_kwargs": {}}}, "mm_processor_kwargs"),
        (Qwen2_5_VLConfig(), {"torch_compile": True}, "torch_compile"),
        (Gemma3Config(), {"vllm_engine_kwargs": {"long_prefill_token_threshold": 100}}, "threshold: 100`, .* 256"),
        (Gemma3Config(text_config={"sliding_window": 8}), {}, "mm_tokens_per_image 256, .* sliding_window, 8"),
        (
            Gemma4Config(text_config=seeing, vision_config=large),
            {},
            "default_output_length 1120, .* sliding_window, 512",
        ),
        (Gemma4Config(text_config={"pad_token_id": 3}, vision_config={}), {}, "pad_token_id 3. .* token 0"),
        (Gemma4Config(text_config={"use_bidirectional_attention": "all"}), {}, "'all': a token attends to later"),
    ):
        folder = tmp_path / str(time.perf_counter())
        config.save_pretrained(folder)
        started = time.perf_counter()
        with pytest.raises(ValueError, match=said):
            check_supported(str(folder), tiny.config(tmp_path, **changes), has_images=True)
        assert time.perf_counter() - started < 10


def test_thumbnails_are_few_and_small_and_a_report_takes_nothing_else() -> None:
    from colograd.apps.report.samples import PICTURE
    from colograd.extensions.recording.completions import data_url

    pictures = tuple(tiny_images.picture(n, 500, 300) for n in range(6))
    made = [*map(data_url, Images("", (), pictures, {}, ()).thumbnails())]
    assert len(made) == 4 and all(len(each) < 6000 for each in made)
    harmful = ["javascript:alert(1)", "data:image/jpeg;base64,<b>"]
    assert [each for each in (*made[:1], *harmful) if PICTURE.fullmatch(each)] == made[:1]


# -- the policy's rows


@pytest.mark.parametrize("family", PACKED)
def test_packed_and_padded_rows_give_one_loss_and_one_gradient(family: str, tried: Callable[..., None]) -> None:
    model = exact_model(family)
    asked = [tiny_images.made_up(model, family, 2)]
    assert row_proof.choose_rows(model, asked=asked) == ""
    groups = groups_of(model, family)
    packed = loss_and_gradients(model, groups, share=True)
    row_proof.set_attention(model, "sdpa")
    padded = loss_and_gradients(model, groups, share=False)
    check_alike(packed, padded, by_size=3e-5 if family == "gemma4_experts" else 0.0)
    tried(family, "packed", padded="where forced")


@pytest.mark.parametrize("family", tiny_images.FAMILIES)
def test_rows_with_images_give_the_models_own_probabilities(family: str) -> None:
    model, _ = tiny_images.random_model(family)
    assert row_proof.choose_rows(model, asked=[tiny_images.made_up(model, family, 2)]) == ""
    rows = pack(groups_of(model, family), 400, False, torch.device("cpu"), share_prompts=True)
    to_sampler, to_own = row_proof.differences(model, rows, 1.0)
    assert float(to_own.max()) < 1e-5
    assert len(to_sampler) - len(to_own) == 4, "all but the completion with an image token that was sampled"


@pytest.mark.parametrize("family", tiny_images.FAMILIES)
def test_probabilities_are_those_of_trl(family: str, tried: Callable[..., None]) -> None:
    """Log-probabilities of the same sample by TRL's own `_get_per_token_logps_and_entropies` are equal."""
    import trl_oracle
    from trl.trainer.grpo_trainer import add_fused_lm_head

    model, _ = tiny_images.random_model(family)
    row_proof.set_attention(model, "sdpa")
    group = groups_of(model, family, completions=1)[1]
    rollout = group.group.rollouts[0]
    row = pack([group], 400, False, torch.device("cpu"), share_prompts=False)[0]
    ours = policy_logprobs(model, row, 1.0)[0]
    trainer = trl_oracle.bare_trainer(temperature=1.0)
    trainer.accelerator.autocast, trainer.accelerator.is_main_process = torch.no_grad, False
    add_fused_lm_head(model, temperature=1.0)
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    seen = own_inputs(rollout.input.images, len(rollout.completion_ids))
    theirs = trainer._get_per_token_logps_and_entropies(
        model, ids, torch.ones_like(ids), len(rollout.completion_ids), num_images=[2], **seen
    )[0]
    assert float((ours - theirs[0]).detach().abs().max()) < 1e-4
    tried(family, trl="log-probabilities")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_told_of_windows_sees_all_of_them_in_one_call(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call over all windows equals a call of `sdpa` for each window, bit for bit without flash attention."""
    narrow = {"window_size": 28} if family == "qwen2_5_vl" else {}  # pixels: of one token
    model, _ = tiny_images.random_model(family, vision=narrow)
    seen, calls = tiny_images.made_up(model, family, 3).images, []

    def count(*args: Any, **options: Any) -> Any:
        calls.append(len(args[3]) - 1)
        return flash_forward(*args, **options)

    def features_and_gradients() -> list[torch.Tensor]:
        model.zero_grad()
        features, deeper = images._features(model, [seen])
        sum((part**2).sum() for part in (features, *deeper)).backward()
        return [features, *(p.grad for name, p in model.named_parameters() if towers.sees(name))]

    row_proof.set_attention(model, attention.NAME)
    assert model.config.vision_config._attn_implementation == "sdpa", "no GPU, nothing else"
    expected = features_and_gradients()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    row_proof.set_attention(model, attention.NAME)
    assert all(torch.equal(*pair) for pair in zip(features_and_gradients(), expected, strict=True))
    monkeypatch.setattr(merged_attention, "kernels", lambda: (count, flash_backward))
    monkeypatch.setattr(attention, "flash_takes", lambda query: True)
    torch.testing.assert_close(features_and_gradients(), expected)
    assert calls == ([6, 3] if family == "qwen2_5_vl" else [3, 3]), "windows of each layer"
    row_proof.set_attention(model, "sdpa")
    assert model.config.vision_config._attn_implementation == "sdpa", "the model's own, for the proof"


def test_towers_that_see_a_picture_at_once_keep_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for family in ("gemma3_vl", "idefics3", "smolvlm"):
        model, _ = tiny_images.random_model(family)
        row_proof.set_attention(model, attention.NAME)
        assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("checkpointing", [0, 1])
@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
def test_a_tower_s_activations_are_estimated(family: str, checkpointing: int) -> None:
    """The estimate is rough: the tower's layers are counted like a decoder's."""
    model, _ = tiny_images.random_model(family)
    tower, seen = Tower.of(model), tiny_images.made_up(model, family, 3).images
    assert tower is not None and tower.patches == 4 and tower.shape.layers == 2
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    held = kept(model.train(), lambda: images._features(model, [seen])[0])
    expected = tower.bytes(len(seen.places), Lengths(len(seen.places), 1, 1), 4, checkpointing)
    assert 0.3 < held / expected < 3, (held, expected)
    images.freeze_tower(model)
    assert Tower.of(model) is None, "what isn't trained keeps nothing"


def test_a_plan_counts_a_tower_and_refuses_what_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = tiny_images.random_model("idefics3")
    model.config.vision_config.intermediate_size = 65
    model.config.save_pretrained(tmp_path)
    arguments = ["plan", "--model", str(tmp_path), "--gpus", "2", "--gpu-memory", "1", "--context", "200"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "activations include a vision tower's" in said and "fsdp" in said
    assert cli.main([*arguments, "--tensor-parallel", "2"]) == 2
    assert "must divide the model's vision_config.intermediate_size, which is 65" in capsys.readouterr().err


def test_a_frozen_tower_gets_no_gradient_and_its_projector_does() -> None:
    for family in PACKED:
        model, _ = tiny_images.random_model(family)
        assert images.freeze_tower(model) > 0
        trained = {name for name, p in model.named_parameters() if p.requires_grad and towers.sees(name)}
        assert trained and all({*name.split(".")} & {*towers.PROJECTORS} for name in trained), trained


# -- runs


COPIED = pytest.param("copied", marks=pytest.mark.slow)


@pytest.mark.engine
@pytest.mark.parametrize("family", [GEMMA3, "idefics3", *OTHERS])
@pytest.mark.parametrize("weights", ["auto", COPIED])
def test_a_family_trains(
    family: str, weights: str, tmp_path: Path, tried: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Three steps: bit-equal weights after each publish, also of the tower; sampler and trainer agree."""
    model = tiny_images.make_model(tmp_path / "model", family)
    pictures: list[Any] = []

    def reward(completions: list[Any], images: list[Any], **kwargs: Any) -> list[float]:
        pictures.extend(images)
        return tiny.vowels(completions)

    logged = {"log_completions": True, "log_completions_steps": 3, "save_strategy": "steps", "save_steps": 3}
    args = tiny.config(tmp_path / "run", max_steps=3, weights=weights, **logged)
    trainer = GRPOTrainer(str(model), reward, args, tiny_images.prompts(8, images=2))
    publish = trainer.weights.publish

    def publish_and_compare(version: int) -> int:
        moved = publish(version)
        assert trainer.weights.differing() == []
        return moved

    assert trainer.engine.vllm_config.scheduler_config.disable_chunked_mm_input == (family == "gemma3_vl")
    trainer.weights.publish = publish_and_compare
    tower = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if towers.sees(name)}
    trainer.train()
    trainer.publish()
    assert trainer.policy.why_padded == "" and all(len(of) == 2 for of in pictures)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    assert all(step["sampling/sampling_logp_difference/mean"] < 1e-5 for step in steps)
    after = dict(trainer.model.named_parameters())
    assert any(not torch.equal(after[name], before) for name, before in tower.items())
    assert re.search(r"\[image (32|64)x32\]", capfd.readouterr().out), "in the table of step 1"
    check_log(Path(args.output_dir), 3, 2)
    if weights == "auto":
        compare_with_what_was_saved(trainer, Path(args.output_dir) / "checkpoint-3", tmp_path)
        tried(family, "shared", "images", "saved")
    else:
        tried(family, "copied")
    trainer.close()


def check_log(run: Path, steps: int, images: int) -> None:
    """Check that each row of each step has its prompt's pictures, as `datasets` reads them."""
    files = sorted(str(path) for path in (run / "completions").glob("completions_*.parquet"))
    rows = Dataset.from_parquet(files, cache_dir=str(run / "cache"))
    assert len(files) == steps and all(len(row["image"]) == len(row["image_size"]) == images for row in rows)
    for row in rows.select(range(2)):
        assert [f"{each.width}x{each.height}" for each in row["image"]] == row["image_size"]


def check_export(run: Path, folder: Path, adapted: Any, family: str) -> None:
    """The exported model, with its tower and processor, has the log-probabilities of the adapted model."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert cli.main(["export", str(run), str(folder)]) == 0
    AutoProcessor.from_pretrained(folder)
    plain, seen = AutoModelForImageTextToText.from_pretrained(folder), tiny_images.made_up(adapted, family, 2)
    inputs = {"input_ids": torch.tensor([seen.ids]), **own_inputs(seen.images, 0)}
    adapted = adapted.float().eval()
    for model in (plain, adapted):
        row_proof.set_attention(model, "sdpa")
    with torch.no_grad():
        theirs, ours = plain(**inputs).logits, adapted(**inputs).logits
        with adapted.disable_adapter():
            base = adapted(**inputs).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    assert float((ours - base).abs().mean()) > 1e-3, "the adapter is in it"


@pytest.mark.slow  # test_resume.py has it without images
@pytest.mark.engine
@pytest.mark.parametrize("family", ["idefics3", GEMMA3, *OTHERS])
def test_a_resumed_run_has_the_same_bits_and_reads_its_images_again(
    family: str, tmp_path: Path, tried: Callable[..., None]
) -> None:
    model = tiny_images.make_model(tmp_path / "model", family)

    def run(folder: str, steps: int, resume: Any = None) -> dict[str, torch.Tensor]:
        settings = {"save_strategy": "steps", "save_steps": 2, "num_iterations": 1} | tiny.ONE_BY_ONE
        args = tiny.config(tmp_path / folder, max_steps=steps, lr_scheduler_type="constant", **settings)
        trainer = GRPOTrainer(str(model), tiny.vowels, args, tiny_images.prompts(8, images=2))
        trainer.train(resume_from_checkpoint=resume)
        found = weights_after(trainer)
        trainer.close()
        return found

    whole = run("whole", 4)
    run("parts", 2)
    again = run("parts", 4, resume=True)
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    tried(family, "resumed")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["gemma3_vl", "idefics3", *OTHERS])
@pytest.mark.parametrize("changes", [{}, {"weights": "copied"}])
def test_adapters_a_reference_and_an_evaluation(
    family: str, changes: dict[str, Any], tmp_path: Path, tried: Callable[..., None]
) -> None:
    import peft

    model = tiny_images.make_model(tmp_path / "model", family)
    text_alone = r".*(language|text)_model.*\.(q|v)_proj"  # else some towers' layers are adapted too, and merged
    targets = ["q_proj", "v_proj"] if changes else text_alone
    lora = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    kind = MergedWeights if changes else AdapterWeights
    changes = {"save_strategy": "steps", "save_steps": 2, **changes}
    args = tiny.config(tmp_path / "run", beta=0.1, max_steps=2, num_iterations=2, learning_rate=1e-2, **changes)
    trainer = GRPOTrainer(
        str(model), tiny.vowels, args, tiny_images.prompts(8), eval_dataset=tiny_images.prompts(3), peft_config=lora
    )
    assert isinstance(trainer.weights, kind)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(step["sampling/sampling_logp_difference/mean"] < 1e-5 for step in steps), steps
    assert trainer.evaluate()["eval_reward"] > 0
    trainer.close()
    check_export(tmp_path / "run", tmp_path / "exported", trainer.model, family)
    if "weights" in changes:
        tried(family, lora_merged="where asked")
    else:
        tried(family, "lora_served")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["gemma3_vl", "idefics3", *OTHERS])
@pytest.mark.parametrize("sharding", ["none", "gradients"])
def test_two_ranks_train_to_the_same_weights(
    family: str, sharding: str, tmp_path: Path, tried: Callable[..., None]
) -> None:
    """A rank's rows may have no images, so its tower gets no gradient. Both ranks still have equal weights."""
    model = tiny_images.make_model(tmp_path / "model", family)
    done = launcher.run(RANKS, str(model), str(tmp_path / "run"), str(tmp_path), "float32", "", sharding, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}-of-2.json").read_text()) for rank in range(2)]
    assert all(step["differing"] == [] for rank in ranks for step in rank["seen"])
    assert ranks[0]["seen"][-1]["weights"] == ranks[1]["seen"][-1]["weights"]
    tried(family, "two_ranks")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("case", ["some", "frozen"])
@pytest.mark.parametrize("family", ["gemma3_vl", "idefics3", *OTHERS])
def test_a_policy_in_rows_ends_with_the_bits_of_whole_ones(
    family: str, case: str, tmp_path: Path, tried: Callable[..., None]
) -> None:
    """One of four prompts has pictures. The tower of a rank without pictures takes part in the step all the same."""
    from transformers import AutoModelForImageTextToText

    model, runs = tiny_images.make_model(tmp_path / "model", family), {}
    for way in ("none", "fsdp"):
        out = tmp_path / way
        out.mkdir()
        done = launcher.run(RANKS, str(model), str(out / "run"), str(out), "float32", case, way, ranks=2)
        assert done.returncode == 0, done.stderr[-3000:]
        runs[way] = [json.loads((out / f"rank{rank}-of-2.json").read_text()) for rank in range(2)]
    for rank, expected in zip(runs["fsdp"], runs["none"], strict=True):
        assert rank["seen"] == expected["seen"] and rank["losses"] == expected["losses"]
        assert all(step["differing"] == [] for step in rank["seen"]) and max(rank["mismatch"]) < 1e-5
    first, second = (rank["pictures"] for rank in runs["fsdp"])
    assert any((mine > 0) != (theirs > 0) for mine, theirs in zip(first, second, strict=True))
    loaded = [AutoModelForImageTextToText.from_pretrained(tmp_path / way / "run" / "final") for way in runs]
    whole, rows = (each.state_dict() for each in loaded)
    assert all(torch.equal(whole[name], value) for name, value in rows.items())
    tried(family, "two_ranks")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["gemma3_vl", "idefics3", *OTHERS])
def test_fsdp_resume_matches_an_uninterrupted_run(family: str, tmp_path: Path) -> None:
    """FSDP resumes with the bits of an uninterrupted run. Its checkpoint has the names of published ones."""
    model = tiny_images.make_model(tmp_path / "model", family)

    def final(folder: str, steps: int, sharding: str) -> bytes:
        arguments = (model, tmp_path / folder, tmp_path / folder, "float32", steps, sharding)
        done = launcher.run(RANKS.with_name("resumed_ranks.py"), *map(str, arguments), ranks=2)
        assert done.returncode == 0, done.stderr[-3000:]
        return (tmp_path / folder / "final" / "model.safetensors").read_bytes()

    expected = final("straight", 4, "gradients")
    final("rows", 2, "fsdp")
    assert final("rows", 4, "fsdp") == expected


@pytest.mark.slow
@pytest.mark.engine
def test_a_tower_that_fails_on_one_rank_ends_both(tmp_path: Path) -> None:
    """Both ranks end, although the healthy rank waits in the middle of the tower's forward."""
    model = tiny_images.make_model(tmp_path / "model", "idefics3")
    done = launcher.run(RANKS, str(model), str(tmp_path / "run"), str(tmp_path), "float32", "tower", "fsdp", ranks=2)
    assert done.returncode != 0
    assert "Rank 1 failed in the forward: RuntimeError: the tower of rank 1 failed" in done.stderr, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.engine
def test_a_frozen_tower_is_published_once(tmp_path: Path) -> None:
    model = tiny_images.make_model(tmp_path / "model", "idefics3")
    args = tiny.config(tmp_path / "run", max_steps=2, weights="copied", freeze_vision_tower=True)
    trainer = GRPOTrainer(str(model), tiny.vowels, args, tiny_images.prompts(8))
    before, moved, publish = weights_after(trainer), [], trainer.weights.publish

    def count(version: int) -> int:
        moved.append(publish(version))
        assert trainer.weights.differing() == []
        return moved[-1]

    trainer.weights.publish = count
    trainer.train()
    trainer.publish()
    frozen = [name for name, p in trainer.model.named_parameters() if not p.requires_grad]
    assert frozen and all(torch.equal(before[name], trainer.model.get_parameter(name)) for name in frozen)
    assert moved[0] > moved[1] == moved[2] > 0
    trainer.close()


def first_and_last(history: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean reward of a run's first five steps, and of its last five."""
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


@pytest.mark.slow
@pytest.mark.engine
def test_a_random_model_learns_colours(tmp_path: Path, tried: Callable[..., None]) -> None:
    from colograd.apps.quickstart import colours
    from colograd.train import main

    colours.make_model(tmp_path / "model")
    recipe = RECIPES / "grpo_colours_cpu.yaml"
    folder = tmp_path / "run"
    main(["--config", str(recipe), "--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(folder)])
    first, last = first_and_last(json.loads((folder / "trainer_state.json").read_text())["log_history"])
    assert first < 0.3 and last > 0.7
    tried("idefics3", "learns")


def codes_the_colour(completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[float]:
    """1 where the token's remainder by six is the colour's number: a sixth of the time without a look at the image."""
    from colograd.apps.quickstart.colours import COLOURS

    numbers = {name: number for number, name in enumerate(COLOURS)}
    return [float(ids[0] % len(numbers) == numbers[name]) for ids, name in zip(completion_ids, answer, strict=True)]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["gemma3_vl", *OTHERS])
def test_a_family_learns_colours(family: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    from colograd.apps.quickstart import colours

    model = tiny_images.make_model(tmp_path / "model", family)
    changes = {
        "max_steps": 200, "learning_rate": 1e-3, "num_generations": 8, "prompts_per_step": 16,
        "max_completion_length": 1, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5,
    }  # fmt: skip
    args = tiny.config(tmp_path / "run", **changes)
    started = time.process_time()
    trainer = GRPOTrainer(str(model), codes_the_colour, args, colours.colours())
    trainer.train()
    trainer.close()
    first, last = first_and_last(trainer.state.log_history)
    print(f"{family}: {first:.2f} -> {last:.2f} in {time.process_time() - started:.0f} processor seconds")
    assert first < 0.3 and last > 0.7
    tried(family, "learns")

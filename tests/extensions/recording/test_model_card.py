"""The model card: its contents, its links, and the private data that it leaves out."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from colograd.apps.report.page import NAME
from colograd.config import ScriptArguments
from colograd.extensions.recording.model_card import license_of, reward_plot, write_card
from colograd.train import dataset_names

GSM8K_ROWS = "colograd.rewards.gsm8k:rows"


def make_history(length: int) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [
        {"step": 10 * (i + 1), "reward": i / length, "reward_std": 0.2, "rewards/right/mean": 0.5, "loss": 0.1}
        for i in range(length)
    ]
    return [*entries, {"step": 10 * length, "eval_reward": 0.9}, {"step": 10 * length, "train_runtime": 3.0}]


def make_run(**changes: Any) -> SimpleNamespace:
    facts: dict[str, Any] = {
        "model_name": "tiny-grpo",
        "base_model": "org/tiny",
        "datasets": ["org/sums"],
        "reward_names": ["right", "short"],
        "reward_weights": [1.0, 0.5],
        "recipe": None,
        "command": "colograd train --config recipes/sums.yaml",
        "settings": {"learning_rate": 1e-6, "loss_type": "dapo"},
        "history": make_history(8),
        "hub_model_id": "me/tiny-grpo",
        "adapter_rank": 0,
        "quantization": None,
        "images": False,
        "base_dtype": "bfloat16",
        "tags": [],
        "teachers": [],
        "license": "",
    }
    return SimpleNamespace(**(facts | changes))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sums.yaml").write_text("model_name_or_path: org/tiny\nmax_tokens_per_microbatch: 4096\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def card(here: Path, **changes: Any) -> str:
    path = write_card(here / "out", run=make_run(**changes))
    assert path == here / "out" / "README.md"
    return path.read_text()


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def test_a_card_links_the_report_beside_it(here: Path) -> None:
    assert "report.html" not in card(here)
    (here / "out" / NAME).write_text("<!doctype html>")
    assert f"[What the run did, step by step]({NAME})" in card(here)


def test_an_adapters_card_says_what_it_adapts_and_how_to_load_it(here: Path) -> None:
    text = card(here, adapter_rank=16)
    assert front_matter(text)["library_name"] == "peft"
    assert "a LoRA adapter of rank 16 for [org/tiny](https://huggingface.co/org/tiny), trained on" in text
    assert 'from_pretrained("me/tiny-grpo").merge_and_unload()' in text and 'LLM(model="merged")' in text
    assert "peft" not in card(here)


def test_a_card_says_how_the_base_was_quantised_and_loads_it_so(here: Path) -> None:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32", "x": 1}
    text = card(here, adapter_rank=16, quantization=settings, base_dtype="float32")
    assert (
        "adapter of rank 16 for [org/tiny](https://huggingface.co/org/tiny) quantised to NF4 (4 bits, bitsandbytes)"
        in text
    )
    arguments = "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype='float32'"
    assert f"BitsAndBytesConfig({arguments})" in text and 'dtype="float32")' in text
    assert "colograd export tiny-grpo merged" in text and "merge_and_unload" not in text
    assert "int8 (8 bits" in card(here, adapter_rank=16, quantization={"load_in_8bit": True, "load_in_4bit": False})


def test_a_card_of_a_model_that_reads_images_asks_it_about_one(here: Path) -> None:
    text = card(here, images=True)
    assert front_matter(text)["pipeline_tag"] == "image-text-to-text"
    assert '"type": "image"' in text and "image_pil" in text and "12 * 7" not in text and "colograd export" not in text
    assert "colograd export tiny-grpo merged" in card(here, images=True, adapter_rank=4)
    quantised = card(here, images=True, adapter_rank=4, quantization={"load_in_4bit": True})
    assert 'base = AutoModelForImageTextToText.from_pretrained("org/tiny", quantization_config=quantised' in quantised
    assert '"type": "image"' in quantised and "AutoPeft" not in quantised and "colograd export" in quantised


def test_the_front_matter_is_what_the_hub_reads(here: Path) -> None:
    assert front_matter(card(here)) == {
        "library_name": "transformers",
        "model_name": "tiny-grpo",
        "base_model": "org/tiny",
        "base_model_relation": "finetune",
        "datasets": ["org/sums"],
        "tags": ["generated_from_trainer", "colograd", "grpo", "reinforcement-learning"],
        "pipeline_tag": "text-generation",
    }
    adapter = front_matter(card(here, adapter_rank=16, license="apache-2.0"))
    assert adapter["base_model_relation"] == "adapter" and "lora" in adapter["tags"]
    assert adapter["license"] == "apache-2.0"


def test_a_distilled_model_s_card_names_its_teacher(here: Path) -> None:
    history = [{"step": step, "teacher_kl": 1 / step} for step in (1, 2, 4)]
    changes = {"reward_names": [], "reward_weights": [], "history": history, "teachers": ["org/large"]}
    text = card(here, **changes, settings={"distillation_kl": "sampled", "loss_type": "dapo"})
    assert "by on-policy distillation from [org/large](https://huggingface.co/org/large)" in text
    assert "Teacher: [org/large]" in text and "| `distillation_kl` | sampled |" in text
    assert "| Step | Teacher KL |\n| --- | --- |\n| 1 | 1 |\n| 2 | 0.5 |\n| 4 | 0.25 |" in text
    for untrue in ("GRPO", "eward", "2402.03300", "2503.14476"):
        assert untrue not in text.replace("colograd train", ""), untrue
    assert front_matter(text)["tags"] == ["generated_from_trainer", "colograd", "distillation"]
    both = card(here, teachers=["org/large"])
    assert "on-policy distillation from" in both and "It was also trained by reinforcement learning with GRPO" in both
    assert "| `right` | 1 |" in both and "2306.13649" in both and "2402.03300" in both


def test_the_base_s_licence_is_read_from_its_card(here: Path) -> None:
    base = here / "base"
    base.mkdir()
    assert license_of(str(base)) == license_of("org/not-in-the-cache") == ""
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    assert license_of(str(base)) == "mit"
    assert "licence (`mit`) applies" in card(here, license="mit") and "licence applies" in card(here)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dataset_name": "org/sums"}, ["org/sums"]),
        ({"dataset_name": GSM8K_ROWS}, [GSM8K_ROWS, "openai/gsm8k"]),
        ({"dataset_name": GSM8K_ROWS, "dataset_kwargs": {"path": "mine.jsonl"}}, [GSM8K_ROWS]),
        ({"datasets": [{"path": "org/a"}, {"path": "org/b"}]}, ["org/a", "org/b"]),
    ],
)  # fmt: skip
def test_a_recipe_s_datasets_are_named(changes: dict[str, Any], names: list[str]) -> None:
    assert dataset_names(ScriptArguments(reward_funcs=["accuracy_reward"], **changes)) == names


def test_benchmarks_of_the_run_are_in_a_table(here: Path) -> None:
    evaluations = [
        {"step": step, "eval_gsm8k_accuracy": value, "eval_gsm8k_accuracy_ci95": 0.02}
        for step, value in ((29, 0.5), (58, 0.61))
    ]
    assert "| `gsm8k` | 58 | 0.61 ± 0.02 |" in card(here, history=[*make_history(4), *evaluations])
    assert "### Benchmarks" not in card(here)


def test_the_hub_library_accepts_the_card(here: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    assert hub.ModelCard(card(here)).data.base_model == "org/tiny"


@pytest.mark.parametrize("dataset", [None, "my.module:make", "data/train.jsonl"])
def test_only_hub_datasets_are_in_the_front_matter(here: Path, dataset: str | None) -> None:
    (here / "data").mkdir()
    (here / "data" / "train.jsonl").touch()
    text = card(here, datasets=[dataset] if dataset else [])
    assert "datasets" not in front_matter(text)
    assert dataset is None or f"Dataset: `{dataset}`" in text


def test_a_script_may_name_several_datasets_and_further_tags(here: Path) -> None:
    text = card(here, datasets=["org/sums", "my.module:make", "org/words"], tags=["mine", "grpo"])
    assert front_matter(text)["datasets"] == ["org/sums", "org/words"]
    assert front_matter(text)["tags"][-1] == "mine" and front_matter(text)["tags"].count("grpo") == 1
    assert "datasets/org/sums), `my.module:make`, [org/words]" in text


def test_the_recipe_is_copied_and_linked(here: Path) -> None:
    recipe = here / "recipes" / "sums.yaml"
    text = card(here, recipe=recipe)
    assert "Recipe: [recipes/sums.yaml](recipe.yaml)" in text
    assert (here / "out" / "recipe.yaml").read_bytes() == recipe.read_bytes()


def test_a_recipe_already_in_the_folder_stays(here: Path) -> None:
    recipe = here / "out" / "recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text("seed: 1\n")
    assert "[out/recipe.yaml](recipe.yaml)" in card(here, recipe=recipe)
    assert recipe.read_text() == "seed: 1\n"


def test_a_run_without_a_recipe_says_so(here: Path) -> None:
    assert "There was no recipe file" in card(here)
    assert not (here / "out" / "recipe.yaml").exists()


def test_the_card_shows_command_rewards_settings_and_versions(here: Path) -> None:
    text = card(here)
    assert "```bash\ncolograd train --config recipes/sums.yaml\n```" in text
    assert "| `right` | 1 |" in text and "| `short` | 0.5 |" in text
    assert "| `learning_rate` | 1e-06 |" in text
    assert "- colograd " in text and "- torch " in text and "- transformers " in text
    assert text.count('model="me/tiny-grpo"') == 2


def test_absolute_paths_stay_private(here: Path) -> None:
    text = card(
        here,
        base_model=str(here / "models" / "base"),
        datasets=["/srv/private/train.jsonl"],
        recipe=Path("/srv/private/recipe_x.yaml"),
        command=f"/opt/venv/bin/colograd train --output_dir={here}/out --x '/home/me/data'",
        settings={"output_dir": "/home/me/out", "resume": str(here / "out")},
        hub_model_id=None,
    )
    for private in (str(here), "/srv", "/opt", "/home"):
        assert private not in text
    assert "`models/base`" in text and "`train.jsonl`" in text and "`recipe_x.yaml`" in text
    assert "colograd train --output_dir=out --x 'data'" in text
    assert "base_model" not in front_matter(text)
    assert "https://arxiv" not in text and "](https:/" not in text.split("## How")[0].split("---\n")[2]


def test_links_and_relative_paths_are_left_alone(here: Path) -> None:
    command = "colograd train --config ./recipes/a.yaml --url https://example.org/a/b --ratio 1/2"
    assert command in card(here, command=command)


@pytest.mark.parametrize(
    "secret",
    ["--hub_token hf_abcdefghijklmnopqrst", "--hub_token=s3cret", "--push_to_hub_token s3cret", "--api_key s3cret"],
)
def test_tokens_stay_private(here: Path, secret: str) -> None:
    (here / "r.yaml").write_text("hub_token: s3cret\nseed: 1\nmax_tokens_per_microbatch: 4096\n")
    text = card(
        here, command=f"colograd train {secret} --seed 1", recipe=here / "r.yaml", settings={"hub_token": "s3cret"}
    )
    copy = (here / "out" / "recipe.yaml").read_text()
    assert "s3cret" not in text + copy and "hf_abc" not in text
    assert "--seed 1" in text and "seed: 1\nmax_tokens_per_microbatch: 4096\n" in copy


def test_the_first_and_last_rewards_are_in_a_table(here: Path) -> None:
    lines = card(here).splitlines()
    start = lines.index("| Step | Reward | Std | `right` | `short` |")
    assert [line.split(" | ")[0] for line in lines[start + 2 : start + 9]] == [
        f"| {step}" for step in (10, 20, 30, "…", 60, 70, 80)
    ]
    assert lines[start + 2] == "| 10 | 0 | 0.2 | 0.5 | – |"


def test_the_reward_curve_is_linked(here: Path) -> None:
    assert "](reward.png)" in card(here)
    assert (here / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_rewards_has_a_card_too(here: Path) -> None:
    text = card(here, history=[], settings={}, command="")
    assert "No reward was logged." in text and "reward.png" not in text


@pytest.mark.parametrize(("loss_type", "dapo"), [("dapo", True), ("grpo", False)])
def test_the_papers_are_cited(here: Path, loss_type: str, dapo: bool) -> None:
    text = card(here, settings={"loss_type": loss_type})
    assert "2402.03300" in text
    assert ("2503.14476" in text) is dapo


@pytest.mark.parametrize(
    "history", [[], make_history(1), [{"step": 1, "reward": 0.0}, {"step": 2, "reward": math.nan}]]
)
def test_fewer_than_two_points_make_no_plot(tmp_path: Path, history: list[dict[str, Any]]) -> None:
    assert reward_plot(history, tmp_path / "reward.png") is None
    assert not (tmp_path / "reward.png").exists()


def test_no_matplotlib_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert reward_plot(make_history(5), tmp_path / "reward.png") is None

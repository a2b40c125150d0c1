"""Shipped files: names that users may write, and which file each names."""

from __future__ import annotations

from pathlib import Path

import pytest
from needs import needs
from paths import RECIPES

from colograd.apps import cli
from colograd.config import parse_arguments
from colograd.policy.loading import chat_template
from colograd.runtime.process import is_verbose
from colograd.runtime.shipped import file_or_shipped

QWEN = RECIPES / "grpo_qwen.yaml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@needs("recording")
@pytest.mark.parametrize("name", ["grpo_qwen", "grpo_qwen.yaml", "recipes/grpo_qwen.yaml", "recipes/grpo_qwen"])
def test_shipped_recipe_is_read_by_name(name: str) -> None:
    _, config, model, recipe = parse_arguments(["--config", name])
    assert recipe == QWEN and model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct" and config.prompts_per_step == 64


@pytest.mark.parametrize("name", ["grpo_qwen", "grpo_qwen.yaml"])
def test_own_file_of_that_name_wins(name: str, folder: Path) -> None:
    (folder / "grpo_qwen.yaml").write_text("model_name_or_path: mine\nverbose: true\n")
    assert file_or_shipped(Path(name)) == Path("grpo_qwen.yaml")
    assert is_verbose(["--config", name])


@pytest.mark.parametrize("name", ["", ".", "recipes", "recipes/../setup.cfg", "../grpo_qwen", "/grpo_qwen", "slurm"])
def test_other_paths_name_no_shipped_file(name: str) -> None:
    assert file_or_shipped(Path(name)) == Path(name)


def test_unknown_recipe_is_one_error() -> None:
    with pytest.raises(ValueError, match=r"'grpo_qwn' doesn't exist: .* lists \(grpo_qwen, "):
        parse_arguments(["--config", "grpo_qwn"])


def test_shipped_template_is_read_outside_the_clone() -> None:
    name = "recipes/chat_templates/smollm2_tools.jinja"
    assert chat_template(name) == (RECIPES.parent / name).read_text()


def test_copies_keep_the_folders_and_never_overwrite(folder: Path) -> None:
    assert cli.recipes(["grpo_qwen", "accelerate_configs", "--to", "mine"]) == 0
    assert (folder / "mine" / "grpo_qwen.yaml").read_bytes() == QWEN.read_bytes()
    assert len([*(folder / "mine" / "accelerate_configs").iterdir()]) == 4
    (folder / "mine" / "grpo_qwen.yaml").write_text("changed")
    with pytest.raises(ValueError, match=r"grpo_qwen\.yaml differs from the shipped file"):
        cli.recipes(["distil_qwen", "grpo_qwen", "--to", "mine"])
    assert not (folder / "mine" / "distil_qwen.yaml").exists()


def test_unknown_name_copies_nothing(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'grpo_qwn' isn't a shipped file: name one, e\.g\. grpo_qwen, "):
        cli.recipes(["grpo_qwen", "grpo_qwn"])
    assert not [*folder.iterdir()]

"""Recipes: every key is a setting, and the accelerate configurations do as their first comments promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from paths import RECIPES

from colograd.config import parse_arguments
from colograd.data.loading import load_datasets
from colograd.rewards import resolve_rewards

recipes = pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)


@recipes
def test_every_key_parses_and_its_value_holds(recipe: Path, tmp_path: Path) -> None:
    script, config, model, found = parse_arguments(["--config", str(recipe), "--output_dir", str(tmp_path)])
    written = yaml.safe_load(recipe.read_text())
    assert found == recipe
    for name, value in written.items():
        if name not in ("output_dir", "report_to"):  # given above; made a list of trackers
            owner = next(group for group in (script, config, model) if hasattr(group, name))
            held = getattr(owner, name)
            if name == "gradient_checkpointing" and config.offloads_activations:  # an entry of its keyword arguments
                held = "offload"
            assert getattr(held, "value", held) == (float(value) if isinstance(held, float) else value), name


@recipes
def test_rewards_are_known_and_the_head_gives_the_command(recipe: Path, tmp_path: Path) -> None:
    script, config, _, _ = parse_arguments(["--config", str(recipe), "--output_dir", str(tmp_path)])
    assert config.distils or script.agent is not None or resolve_rewards(script.reward_funcs, config.reward_weights)
    head = recipe.read_text().split("\n\n")[0]
    assert f"accelerate launch colograd/train.py --config recipes/{recipe.name}" in head
    assert "xpect" in head


def test_the_quickstart_finds_its_dataset_without_a_network(tmp_path: Path) -> None:
    arguments = ["--config", str(RECIPES / "grpo_smollm2_cpu.yaml"), "--output_dir", str(tmp_path)]
    train, test = load_datasets(parse_arguments(arguments)[0])
    assert {"prompt", "answer"} <= set(train.column_names) and test is None

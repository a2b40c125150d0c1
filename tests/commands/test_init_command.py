"""`colograd init`: what it writes trains, what it can't write is refused, and a mistyped command is recognised."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from colograd.commands.cli import main
from colograd.config import parse_arguments
from colograd.rewards.functions import resolve_rewards


def written(folder: Path) -> dict:
    return yaml.safe_load((folder / "recipe.yaml").read_text())


def test_without_data_it_makes_an_example_that_fits_its_recipe(tmp_path: Path, capsys) -> None:
    assert main(["init", str(tmp_path / "task"), "--yes", "--model", "some/model"]) == 0
    said = capsys.readouterr().out
    assert "colograd train --config recipe.yaml" in said and f"cd {tmp_path / 'task'}" in said
    recipe = written(tmp_path / "task")
    assert recipe["dataset_name"] == "prompts.jsonl" and recipe["reward_funcs"] == ["last_number"]
    rows = [json.loads(line) for line in (tmp_path / "task" / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 100 and rows[34] == {"prompt": "What is 3 + 4? Give only the number.", "answer": "7"}
    script, config, model, _ = parse_arguments(["--config", str(tmp_path / "task" / "recipe.yaml"), "--use_cpu"])
    assert model.model_name_or_path == "some/model" and config.num_generations == 8
    assert script.all_rewards() == ["last_number"]


@pytest.mark.parametrize(
    ("name", "text", "reward", "completions", "expected"),
    [
        ("a.jsonl", '{"question": "q", "solution": "#### 12"}\n', "number", ["so 12", "12 or 13", "no"], [1, 0, 0]),
        ("a.json", '[{"question": "q", "solution": "paris"}]', "own", ["it is paris.", "parish", "no"], [1, 0, 0]),
        ("a.csv", "question,solution\nq,paris\n", "own", [[{"role": "a", "content": "paris"}]] * 3, [1, 1, 1]),
    ],
)
def test_columns_are_found_and_the_reward_works(
    name: str, text: str, reward: str, completions: list, expected: list, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["init", str(tmp_path), "--data", str(tmp_path / name), "--model", "m", "--yes"]) == 0
    recipe = written(tmp_path)
    assert (recipe["dataset_prompt_column"], recipe["reward_funcs"]) == ("question", ["mytask:right"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mytask", raising=False)
    (function,) = resolve_rewards(recipe["reward_funcs"], None)
    wanted = "#### 12" if reward == "number" else "paris"
    assert function.function(completions=completions, solution=[wanted] * 3) == expected
    monkeypatch.delitem(sys.modules, "mytask")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "gone.jsonl"], "there is no file gone.jsonl"),
        (["--data", "bad.jsonl"], "bad.jsonl can't be read as jsonl"),
        (["--data", "rows.jsonl", "--prompt-column", "text"], "no column 'text' for the prompt; it has 'a', 'b'"),
        (["--data", "rows.jsonl"], "no column ''"),
    ],
)
def test_what_can_t_be_is_refused_and_nothing_is_written(arguments, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{no json")
    Path("rows.jsonl").write_text('{"a": 1, "b": 2}')
    assert main(["init", "new", "--yes", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("model", "chats"), [("org/Some-Instruct", True), ("org/gemma-3-1b-it", True), ("org/base", False)]
)
def test_a_chat_model_gets_conversations(model: str, chats: bool, tmp_path: Path) -> None:
    assert main(["init", str(tmp_path), "--model", model, "--yes"]) == 0
    assert ("system_prompt" in written(tmp_path)) == chats


def test_nothing_is_overwritten(tmp_path: Path, capsys) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    assert main(["init", str(tmp_path), "--yes"]) == 2
    assert "never overwritten" in capsys.readouterr().err and (tmp_path / "recipe.yaml").read_text() == "mine"


def test_a_mistyped_command_is_recognised(capsys) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean `colograd train`?" in capsys.readouterr().err
    assert main(["--help"]) == 0 and main([]) == 2

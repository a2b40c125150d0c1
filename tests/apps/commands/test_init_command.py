"""`colograd init`: the recipe trains, unusable models are refused, and a mistyped command gets a suggestion."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import large
import pytest
import torch
import yaml
from paths import RECIPES

from colograd.apps import init
from colograd.apps.cli import main
from colograd.config import parse_arguments
from colograd.extensions.agents.sessions import Agent
from colograd.rewards.functions import resolve_rewards
from colograd.runtime import process
from colograd.runtime.importing import find_object


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


def test_an_agent_is_written_that_its_recipe_names(tmp_path: Path, monkeypatch) -> None:
    assert main(["init", str(tmp_path), "--yes", "--agent", "--model", "some/model"]) == 0
    script, config, _, _ = parse_arguments(["--config", str(tmp_path / "recipe.yaml"), "--use_cpu"])
    assert script.agent == "myagent:run" and not script.all_rewards() and config.agent_timeout == 300
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "myagent", raising=False)
    assert Agent.of(find_object(script.agent, "agent", callable)).name == "run"
    monkeypatch.delitem(sys.modules, "myagent")


@pytest.mark.parametrize(
    ("name", "text", "reward", "completions", "expected"),
    [
        ("a.jsonl", '{"question": "q", "solution": "#### 12"}\n', "number", ["so 12", "12 or 13", "no"], [1, 0, 0]),
        ("a.json", '[{"question": "q", "solution": "paris"}]', "own", ["it is paris.", "parish", "no"], [1, 0, 0]),
        ("a.jsonl", '{"question": "q", "solution": "#### 12"}\n', "number", ["so 12.0", "1,012", "12e3"], [1, 0, 0]),
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
        (["--data", "gone.jsonl"], "can't be loaded: there is no such file"),
        (["--data", "bad.jsonl"], "'bad.jsonl' can't be loaded: line 1 isn't JSON"),
        (["--data", "rows.jsonl", "--prompt-column", "text"], "--prompt-column is 'text', but must be one of 'a', 'b'"),
        (["--data", "rows.jsonl"], "--prompt-column is '', but must be one of 'a', 'b'"),
        (["--data", "rows.txt"], "the name ends in '.txt': convert the file"),
        (["--model", "./gone"], "there is no folder ./gone"),
    ],
)
def test_what_can_t_be_is_refused_and_nothing_is_written(arguments, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{no json")
    Path("rows.txt").write_text("a")
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


FIELDS = ("num_generations", "prompts_per_step", "max_completion_length", "learning_rate", "warmup_steps")


@pytest.mark.parametrize(
    ("model", "has_gpu", "source", "changes"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", True, "grpo_qwen", {}),
        ("Qwen/Qwen2.5-1.5B-Instruct", False, "grpo_qwen", {}),  # a CPU doesn't train it: the recipe is for elsewhere
        ("org/SmolLM2-135M-Instruct", False, "grpo_smollm2_cpu", {}),
        ("org/SmolLM2-135M-Instruct", True, "grpo_qwen", {"learning_rate": 2e-5}),
        ("org/Qwen3-0.6B", True, "grpo_qwen", {"learning_rate": 5e-6}),
        ("org/no-size", True, "grpo_qwen", {}),
    ],
)
def test_size_and_machine_choose_the_recipe(
    model: str, has_gpu: bool, source: str, changes: dict, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(process, "gpu_nodes", lambda: ["/dev/nvidia0"] * has_gpu)
    monkeypatch.setattr(init, "_fits", lambda model, length: True)
    assert main(["init", str(tmp_path), "--model", model, "--yes"]) == 0
    recipe, expected = written(tmp_path), yaml.safe_load((RECIPES / f"{source}.yaml").read_text()) | changes
    assert {field: recipe[field] for field in FIELDS} == {field: expected[field] for field in FIELDS}
    assert "use_peft" not in recipe


def test_an_adapter_is_trained_where_all_weights_don_t_fit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process, "gpu_nodes", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 2**30, name="H100")
    )
    model = large.folder(tmp_path / "Qwen2.5-7B")
    assert main(["init", str(tmp_path / "task"), "--model", str(model), "--yes"]) == 0
    recipe = written(tmp_path / "task")
    assert recipe["use_peft"] and recipe["learning_rate"] == 1e-5
    assert recipe["lora_dropout"] == 0, "the sampler has none"
    parse_arguments(["--config", str(tmp_path / "task" / "recipe.yaml"), "--use_cpu"])


def test_long_texts_get_longer_completions(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "why " * 80, "answer": "so"}))
    assert main(["init", str(tmp_path), "--data", str(tmp_path / "a.jsonl"), "--model", "m", "--yes"]) == 0
    assert written(tmp_path)["max_completion_length"] == 128


def test_wizard_repeats_and_takes_the_last_column(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "2 + 2?", "gold": "4", "topic": "sums"}')
    (tmp_path / "b.jsonl").write_text('{"text": "2 + 2?", "gold": "4"}')
    monkeypatch.chdir(tmp_path)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    answers = ["./gone", "m", "gone.jsonl", "a.jsonl", "txt", "text", "golden", "gold", "numbers", "number"]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(answers)))
    assert main(["init", "one"]) == 0
    said = capsys.readouterr().out
    assert "text: '2 + 2?'" in said and "topic: 'sums'" in said
    assert (tmp_path / "one" / "mytask.py").exists() and written(tmp_path / "one")["dataset_prompt_column"] == "text"
    monkeypatch.setattr(sys, "stdin", Terminal("m\nb.jsonl\ntext\n\n"))  # the reward's default, and no other question
    assert main(["init", "two"]) == 0
    assert "right(completions, gold," in (tmp_path / "two" / "mytask.py").read_text()
    (tmp_path / "c.jsonl").write_text('{"answer": "4", "text": "2 + 2?"}')
    assert main(["init", "three", "--yes", "--data", "c.jsonl"]) == 0
    assert written(tmp_path / "three")["dataset_prompt_column"] == "text"


@pytest.mark.parametrize("name", ["recipe.yaml", "mytask.py", "prompts.jsonl"])
def test_nothing_is_overwritten(name: str, tmp_path: Path, capsys) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["init", str(tmp_path), "--yes"]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_a_mistyped_command_is_recognised(capsys) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean `colograd train`?" in capsys.readouterr().err
    assert main(["--help"]) == 0 and main([]) == 2

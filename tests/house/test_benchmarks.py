"""The benchmarks: their prompts, figures and forms; and side by side with TRL on a tiny model."""

from __future__ import annotations

import ast
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import launcher
import pytest
import tiny
from paths import BENCHMARKS, ROOT

from colograd.policy import head as policy_head

sys.path.insert(0, str(BENCHMARKS))

import side_by_side


def test_imports_name_what_exists() -> None:
    """Imports inside functions, too, of the package, benchmarks, helpers and scripts: not all of them run here."""
    missing = []
    paths = [path for folder in ("colograd", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in paths:
        package = ".".join(path.relative_to(ROOT).parent.parts)
        for node in ast.walk(ast.parse(path.read_text())):
            name = "." * getattr(node, "level", 0) + str(getattr(node, "module", "") or "")
            if not isinstance(node, ast.ImportFrom) or not name.startswith(("colograd", ".")):
                continue
            try:
                module = importlib.import_module(name, package)
                for alias in node.names:
                    if alias.name != "*" and not hasattr(module, alias.name):
                        importlib.import_module(f"{module.__name__}.{alias.name}")
            except ModuleNotFoundError as error:
                if str(error.name).startswith("colograd"):  # other packages may be missing
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {error.name}")
    assert not missing


def forked(benchmark: str, *arguments: Any) -> str:
    """Run a benchmark as a fork of a process with all imports, and return its output."""
    done = launcher.run(BENCHMARKS / f"{benchmark}.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_start_ends_at_the_first_generation(tiny_model: Path, tmp_path: Path) -> None:
    import startup

    settings = {"model_name_or_path": tiny_model, "max_steps": 1}
    flags = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    stages = startup.measure(["--config", str(startup.RECIPE), *flags], ranks=1)
    assert {"import vllm", "engine and policy brought together", "dataset"} <= set(stages["seconds"])
    assert {"forwards of the policy on the cpu", "forwards of the engine on the cpu"} == set(stages["counts"])
    assert [count for _, count in startup.planned()] == ["55", "459"]


@pytest.mark.slow
def test_log_probabilities_stay_under_the_memory_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark itself, on a smaller vocabulary: tiles are no smaller than with a large one."""
    import logprobs_memory

    def apart(variant: str, labels: int, options: Any) -> dict[str, Any]:
        said = forked("logprobs_memory", *sizes, "--variant", variant, "--labels", labels)
        return json.loads(said.splitlines()[-1])

    sizes = ("--vocabulary", "32000", "--hidden", "64")
    monkeypatch.setattr(logprobs_memory, "measure_apart", apart)
    files = ("--out", str(tmp_path / "f.json"))
    assert logprobs_memory.main([*sizes, "--labels", "2048", "--full-labels", "2048", *files]) == 0
    found = json.loads((tmp_path / "f.json").read_text())["variants"]
    assert found["tiles"]["beyond_bytes"] < 0.3e9 < found["full"]["beyond_bytes"]


def test_versions_of_the_head_are_timed_in_turns(tmp_path: Path) -> None:
    other = ("--other", Path(policy_head.__file__), "--out", tmp_path / "f.json")
    said = forked("head", "--labels", "8", "--hidden", "4", "--vocabulary", "32", "--trials", "1", "--entropy", *other)
    assert "| forward and backward |" in said
    found = json.loads((tmp_path / "f.json").read_text())
    assert set(found["ms"]["forward"]) >= {"colograd", "other"} and len(found["differences"]) == 4
    assert not any(found["differences"].values())


def test_steps_of_the_optimizer_are_timed_in_turns(tmp_path: Path) -> None:
    sizes = ("--shapes", "300x200", "77", "--steps", "3", "--limit", "1000")
    said = forked("optimizer", *sizes, "--out", tmp_path / "f.json")
    assert said.count("\n| ") == 5  # header, rule, three contestants
    found = json.loads((tmp_path / "f.json").read_text())
    bytes_each = {name: figures["state_bytes_per_parameter"] for name, figures in found["variants"].items()}
    assert bytes_each == {"split": 10, "foreach": 8, "fused": 8}
    assert all(len(figures["steps"]) == 2 and figures["step_s"] > 0 for figures in found["variants"].values())
    assert 0 < found["ratio"]["split"] < 1000


def test_reward_models_give_the_same_rewards_each_way(tiny_model: Path, tmp_path: Path) -> None:
    """The benchmark itself compares them, and ends where they differ."""
    sizes = ("--model", tiny_model, "--groups", "2", "--max-words", "8", "--trials", "1")
    said = forked("reward_models", *sizes, "--out", tmp_path / "f.json")
    assert said.count("\n| ") == 5  # header, rule, three ways
    assert all(json.loads((tmp_path / "f.json").read_text())[f"processor_s.{way}"] > 0 for way in ("at_once", "padded"))


def test_training_is_measured_and_profiled_without_an_engine(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("--prompt-tokens", "70", "--completion-tokens", "16", "--num-generations", "4", "--prompts-per-step", "2")
    said = forked("training_path", "--model", tiny_model, *sizes, "--profile", "--out", tmp_path / "f.json")
    assert "| attention, ms of the profiled training (calls) |" in said
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["faults"] == [] and found["kernels"] and len(found["steps"]) == 4


def test_a_long_prompt_takes_few_encodings() -> None:
    """A token per letter: words of 4 to 6 tokens."""
    calls = []

    def encode(text: str) -> tuple[str, list[int]]:
        calls.append(text)
        return text, list(text.encode())

    prompt = side_by_side._fit(encode, 4096, random.Random(0))
    assert prompt is not None and len(prompt) == 4096 and len(calls) < 300


@pytest.mark.slow
@pytest.mark.engine
def test_rollouts_are_timed_in_turns_and_rewards_hide_behind_them(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("--prompts", "6", "--completion-tokens", "40", "--mean-tokens", "20", "--trials", "1")
    said = forked("rollouts", "--model", tiny_model, "--dtype", "float32", *sizes, "--json", tmp_path / "f.json")
    assert "| Engine.generate, streaming, trivial reward |" in said
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["throughput"]["shortest"] < found["throughput"]["longest"] == 40, "lengths are spread"
    assert found["ratio"]["throughput"] > 0.3 and 0 < found["ratio"]["streamed_rewards"] <= 1
    (run,) = found["rewards"]
    assert run["reward_s"] >= 6 * found["sleep_s"] and run["hidden_s"] <= run["reward_s"]


@pytest.mark.slow
@pytest.mark.engine
def test_publishes_are_timed_beside_a_plain_copy_and_the_loader(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import weights

    def apart(way: str, options: Any) -> dict[str, Any]:
        return json.loads(forked("weights", *command, "--way", way).splitlines()[-1])

    command = ["--model", str(tiny_model), "--dtype", "float32", "--publishes", "2", "--eager"]
    monkeypatch.setattr(weights, "measure_apart", apart)
    assert weights.main([*command, "--out", str(tmp_path / "f.json")]) == 0
    assert "| publish, ms |" in capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())
    shared, copied = found["ways"]["shared"], found["ways"]["copied"]
    assert shared["moved_bytes"] == 0 < copied["moved_bytes"] < 2 * shared["weights_bytes"]
    assert copied["weights_bytes"] > shared["weights_bytes"] and found["ratio"]["loader_over_copied"] > 0


@pytest.mark.slow
@pytest.mark.engine
def test_both_trainers_run_side_by_side(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    command = [sys.executable, str(BENCHMARKS / "side_by_side.py"), "--model", str(tiny_model), "--signal", "0.5"]
    command += ["--prompt-tokens", "70", "--completion-tokens", "8", "--num-generations", "4"]
    command += ["--prompts-per-step", "2", "--steps", "2", "--dtype", "float32", "--out", str(tmp_path / "f.json")]
    command += ["--also", "trl-uncorrected", "colograd-repeated"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=tiny.clean_environment())
    assert done.returncode == 0
    assert "| tokens through the model |" in done.stdout
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["settings"]["prompt_tokens"] == 70 and found["settings"]["dtype"] == "float32"
    assert {"step", "train", "memory", "train_recorded"} <= found["ratio"].keys()
    ours, theirs = found["trainers"]["colograd"], found["trainers"]["trl"]
    assert all(trainer[name] > 0 for trainer in (ours, theirs) for name in side_by_side.FIGURES)
    # One of two groups carries a signal: its prompt once and at most 4 x 8 completion tokens, in one forward.
    assert ours["forwards"] == 1 and 70 < ours["tokens_recorded"] <= 70 + 4 * 8
    # TRL: every prompt with every completion, padded, through two forwards.
    assert theirs["forwards"] == 2 and theirs["tokens_recorded"] >= 2 * 8 * (70 + 1)
    uncorrected, repeated = found["trainers"]["trl-uncorrected"], found["trainers"]["colograd-repeated"]
    assert (uncorrected["forwards"], uncorrected["tokens_recorded"]) == (1, theirs["tokens_recorded"] / 2)
    # Without shared prompts: the prompt with each completion of the group that carries a signal, unpadded.
    assert repeated["tokens_recorded"] == ours["tokens_recorded"] + 3 * 70

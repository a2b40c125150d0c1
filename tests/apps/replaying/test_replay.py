"""`colograd replay`: recorded steps come out bit for bit without an engine, and leave the run as it was."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launcher
import pytest
import yaml

from colograd.apps.cli import main
from colograd.apps.replay import parse, write_recipe
from colograd.apps.replaying.replayer import read_figures
from colograd.config import given_settings
from colograd.engine import vllm_engine
from colograd.rollout.record_file import FIGURES, add_step
from colograd.rollout.store import FOLDER

pytestmark = pytest.mark.engine

STEP = re.compile(r"^replay: step (\d+): loss (\S+), grad_norm (\S+?); (.*)$", re.MULTILINE)


def recipe(model: Path, folder: Path) -> dict[str, Any]:
    """A recipe with two optimizer steps per generation. The second step is off-policy."""
    return {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "bf16": False,
        "dataset_name": "tiny:prompts",
        "reward_funcs": ["tiny:vowels"],
        "output_dir": str(folder),
        "num_generations": 4,
        "prompts_per_step": 2,
        "steps_per_generation": 2,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "no",
        "journal": "keep",
        "log_completions": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "hub_token": "hf_abcdefghijklmnopqrstuvwxyz",
        "env": {"COLOGRAD_TEST_VARIABLE": "1"},
    }


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("run") / "out"
    path = folder.with_name("recipe.yaml")
    path.write_text(yaml.safe_dump(recipe(tiny_model, folder)))
    assert main(["train", "--config", str(path), "--lr_scheduler_type", "linear"]) == 0
    return folder


@pytest.fixture(autouse=True)
def no_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Fail if a test imports vLLM after the run or builds an engine."""
    request.getfixturevalue("run")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.setitem(sys.modules, name, None)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("an engine is built")

    monkeypatch.setattr(vllm_engine.VLLMEngine, "__init__", refuse)
    monkeypatch.chdir(tmp_path)
    yield


def files(folder: Path) -> dict[str, tuple[int, int]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def replay(run: Path, *flags: str) -> int:
    return main(["replay", str(run), *flags])


def noted(run: Path) -> dict[int, dict[str, float]]:
    return {s: f for folder in (run / FOLDER).glob("step-*") for s, f in read_figures(folder).items()}


def test_replayed_steps_are_equal_and_change_nothing(run: Path, capfd: Any, tmp_path: Path) -> None:
    before = files(run)
    assert replay(run, "--step", "4", "--to", "5", "--profile") == 0
    said = capfd.readouterr().out
    assert re.search("trains steps 3 to 5 of .* again from checkpoint-2 on, and shows steps 4 to 5", said)
    assert [(int(step), told) for step, _, _, told in STEP.findall(said)] == [
        (4, "as recorded, bit for bit"),
        (5, "as recorded, bit for bit"),
    ]
    assert "2 of 2 step(s) came out bit for bit as recorded" in said and "step 3/6" not in said
    assert files(run) == before, "nothing is written there"
    assert "engine: none" in said and "KV cache" not in said and "weights of the engine" not in said
    # ... and the profile covers exactly the requested steps, with their phases.
    events = json.loads((tmp_path / "replay-4-5" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("train") == 2 and "optimizer" in names and any("aten::" in name for name in names)
    assert "aten::" in (tmp_path / "replay-4-5" / "operators.txt").read_text()


def test_what_is_noted_is_what_was_logged(run: Path) -> None:
    state = json.loads((run / "trainer_state.json").read_text())
    logged = {entry["step"]: entry for entry in state["log_history"] if "grad_norm" in entry}
    for step, figures in noted(run).items():
        assert figures["grad_norm"] == logged[step]["grad_norm"]
        assert figures["loss"] == pytest.approx(logged[step]["loss"], rel=1e-6), "that went through float32"
    assert sorted(noted(run)) == [1, 2, 3, 4, 5, 6]


def test_without_a_checkpoint_it_begins_at_the_model(run: Path, capfd: Any, tmp_path: Path) -> None:
    shutil.copytree(run / FOLDER, tmp_path / "copy" / FOLDER)
    assert replay(tmp_path / "copy", "--step", "3") == 0
    said = capfd.readouterr().out
    assert re.search("trains steps 1 to 3 of .* again from the model on, and shows step 3", said)
    assert [told for *_, told in STEP.findall(said)] == ["as recorded, bit for bit"]


def test_replay_takes_other_settings_and_reports_differences(run: Path, capfd: Any) -> None:
    assert replay(run, "--step", "3", "--to", "4", "--learning_rate", "3e-3", "--loss_type", "cispo") == 0
    said = capfd.readouterr().out
    assert all(told.startswith("recorded: loss ") for *_, told in STEP.findall(said))
    assert re.search(
        r"0 of 2 step\(s\) .* largest differences: .*\(with --learning_rate 3e-3 --loss_type cispo\)", said
    )


def test_a_damaged_checkpoint_is_passed_over(run: Path, capfd: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    weights = copy / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert replay(copy, "--step", "5") == 0
    said = capfd.readouterr().out
    assert "checkpoint-4 is damaged and isn't taken" in said and re.search("trains steps 3 to 5 of .* again", said)
    assert [told for *_, told in STEP.findall(said)] == ["as recorded, bit for bit"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], r"--step is missing, but must be a step of the run"),
        (["--step", "0"], r"--step is 0, but must be"),
        (["--step", "x"], r"argument --step: invalid int value: 'x'"),
        (["--step", "3", "--to", "2"], r"--to is 2, but must be at least --step \(3\): raise it"),
        (["--step", "7"], r"max_steps is 6: name steps of the run"),
        (
            ["--step", "7", "--max_steps", "8"],
            r"round of steps 7 to 8 isn't recorded in .*_journal. That folder holds 3 round",
        ),
        (
            ["--step", "3", "--temperature", "0.5"],
            r"recorded with `temperature` 1\.0, but now it is 0\.5: a replay trains",
        ),
        (["--step", "3", "--steps_per_generation", "1"], r"recorded with `steps_per_generation` 2, but now it is 1"),
        (["--step", "3", "--num_generations", "2"], r"recorded with `num_generations` 4, but now it is 2"),
        (["--step", "3", "--learning_rat", "1"], r"learning_rat"),
        (["--step", "3", "--profile", "RUN/profile"], r"--profile is .*a replay writes nothing into the run's folder"),
    ],
)
def test_bad_input_is_one_clear_error(run: Path, capfd: Any, flags: list[str], said: str) -> None:
    assert replay(run, *(flag.replace("RUN", str(run)) for flag in flags)) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert re.search(said, line), line


def test_rounds_that_are_gone_are_an_error_with_the_remedy(run: Path, capfd: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    records = copy / FOLDER / "step-00000002" / "rank-00000.records"
    records.write_bytes(records.read_bytes()[:-7])
    assert replay(copy, "--step", "4") == 2
    said = capfd.readouterr().err
    assert "begin at checkpoint-2, but the round of steps 3 to 4 has 3 of its 4 groups" in said
    assert "`journal: keep` records all rounds" in said and "save_steps" in said
    shutil.rmtree(copy / FOLDER / "step-00000000")
    assert replay(copy, "--step", "2") == 2
    assert "initial model, as no whole checkpoint is earlier (all checkpoints: steps 2, 4, 6)" in capfd.readouterr().err
    (copy / FOLDER / "recipe.yaml").unlink()
    assert replay(copy, "--step", "6") == 2
    assert "has no recorded recipe (_journal/recipe.yaml)" in capfd.readouterr().err
    assert replay(tmp_path / "nowhere", "--step", "6") == 2


def test_recipe_has_flags_and_no_secrets(run: Path, tmp_path: Path) -> None:
    written = yaml.safe_load((run / FOLDER / "recipe.yaml").read_text())
    assert written["lr_scheduler_type"] == "linear" and written["learning_rate"] == 1e-3
    assert written["env"] == {"COLOGRAD_TEST_VARIABLE": "1"} and written["hub_token"] == "<removed>"
    assert given_settings(["--config", str(run / FOLDER / "recipe.yaml")]) == written, "it is a recipe itself"
    left = yaml.safe_load(write_recipe(*parse([str(run), "--step", "6"]), tmp_path).read_text())
    assert not {"save_steps", "hub_token", "log_completions"} & left.keys() and left["output_dir"] != str(run)
    assert left["report_to"] == "none" and left["learning_rate"] == 1e-3


def test_torn_and_foreign_lines_of_figures_are_left_out(tmp_path: Path) -> None:
    for step in (1, 2, 1):
        add_step(tmp_path / FIGURES, step, {"loss": 0.1 * step, "grad_norm": 1 / 3})
    path = tmp_path / "steps.jsonl"
    path.write_text(path.read_text() + '\n[1]\n{"step": "x"}\n{"step": 9, "loss": {}}\n{"step": 3, "lo')
    add_step(tmp_path / FIGURES, 4, {"loss": 1e-300})
    assert read_figures(tmp_path) == {
        1: {"loss": 0.1, "grad_norm": 1 / 3}, 2: {"loss": 0.2, "grad_norm": 1 / 3}, 4: {"loss": 1e-300},
    }  # fmt: skip


@pytest.mark.slow
def test_on_two_ranks(tiny_model: Path, tmp_path: Path) -> None:
    """A recording of two ranks replays bit for bit on two ranks, and up to rounding on one rank."""
    folder, path = tmp_path / "out", tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(tiny_model, folder) | {"max_steps": 4}))
    for command in (["train", "--config", str(path)], ["replay", str(folder), "--step", "3", "--to", "4"]):
        done = launcher.run("colograd.apps.cli", *command, ranks=2)
        assert done.returncode == 0, done.stderr[-3000:]
    assert [told for *_, told in STEP.findall(done.stdout)] == ["as recorded, bit for bit"] * 2
    assert "2 of 2 step(s)" in done.stdout

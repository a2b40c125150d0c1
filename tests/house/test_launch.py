"""The ways to start a run, each as a user types it, on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import launcher
import pytest
import tiny
import yaml
from paths import HELPERS, ROOT

from colograd.runtime import process

pytestmark = pytest.mark.engine

TRAIN = ROOT / "colograd" / "train.py"


@pytest.fixture(scope="module")
def recipe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the data and the reward by name; modules of the working directory can be imported."""
    path = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    settings = tiny.recipe(tiny_model, logging_steps=1, save_strategy="no", report_to="none")
    settings["learning_rate"] = "1e-3"  # as people write it
    path.write_text(yaml.safe_dump(settings))
    return path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=tiny.PATIENCE,
        cwd=HELPERS,
        env=tiny.clean_environment(),
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done


def rewards(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["reward"] for entry in state["log_history"] if "reward" in entry]


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`colograd train --config ... --max_steps 3`, as a fork of a process with all imports."""
    folder = tmp_path_factory.mktemp("alone")
    flags = ("--config", recipe, f"--output_dir={folder}", "--max_steps", "3")
    done = launcher.run("colograd.apps.cli", "train", *flags, cwd=HELPERS)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def launched(
    request: pytest.FixtureRequest, recipe: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """`torchrun --nproc-per-node N -m colograd.train --config ...`. Other tests fork their ranks, because each real one
    imports for 15 seconds. The run before has filled vLLM's cache of the model's class, which takes a further process.
    """
    folder = tmp_path_factory.mktemp("launched")
    done = run(
        "-m", "torch.distributed.run", "--nproc-per-node", str(request.param), "--master-port",
        str(process.free_port()), "-m", "colograd.train", "--config", str(recipe), "--output_dir", str(folder),
        "--log_completions", "true",
    )  # fmt: skip
    return folder, done.stdout + done.stderr


def test_torchrun_of_the_module_leaves_model_state_card_and_plot(launched) -> None:
    folder, _ = launched
    expected = {"model.safetensors", "config.json", "tokenizer.json", "trainer_state.json", "README.md", "recipe.yaml"}
    assert expected | {"reward.png"} <= {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    assert "recipe.yaml" in card and "tiny:prompts" in card and "vowels" in card and "reward.png" in card


def test_a_run_says_what_it_is_and_where_each_second_went(launched) -> None:
    _, output = launched
    lines = output.splitlines()
    assert any(line.startswith("engine: vLLM ") and "KV cache" in line for line in lines)
    assert any(line.startswith("weights: shared, 20 parameters") for line in lines)
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 2 and all(" s: generate " in line for line in steps)
    assert "Advantage" in output, "the table of completions"


def test_other_packages_chatter_stays_off_the_terminal(launched) -> None:
    _, output = launched
    for noise in ("INFO", "it/s", "parallel_mode", "NUMA", "Setting accelerator"):
        assert noise not in output, noise


@pytest.mark.slow  # torchrun's ranks read the same variables
def test_accelerate_launch_of_the_file_trains_the_same_on_one_rank(recipe, launched, tmp_path) -> None:
    """`accelerate launch colograd/train.py --config ...`, as on a machine with one GPU."""
    run(
        "-m", "accelerate.commands.launch", "--num_processes", "1", str(TRAIN),
        "--config", str(recipe), "--output_dir", str(tmp_path),
    )  # fmt: skip
    assert rewards(tmp_path) == pytest.approx(rewards(launched[0]), abs=1e-5)


@pytest.mark.slow
def test_adapter_by_flags_trains_on_two_ranks(recipe, tmp_path) -> None:
    """An adapter's random start is the same on all ranks. Completions depend on it from the second step on."""
    flags = ["--use_peft", "true", "--lora_r", "4", "--lora_dropout", "0", "--lora_target_modules", "all-linear"]
    flags = ["--config", str(recipe), *flags, "--max_steps", "3", "--learning_rate", "1e-2"]
    done = run("-m", "colograd.apps.cli", "train", *flags, f"--output_dir={tmp_path / 'one'}")
    assert "weights: adapter, 28 tensors" in done.stdout
    run(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(process.free_port()),
        str(TRAIN), *flags, "--output_dir", str(tmp_path / "two"),
    )  # fmt: skip
    assert rewards(tmp_path / "two") == pytest.approx(rewards(tmp_path / "one"), abs=1e-5)
    saved = {path.name for path in (tmp_path / "two").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= saved
    assert "model.safetensors" not in saved and "LoRA adapter of rank 4" in (tmp_path / "two" / "README.md").read_text()


def test_console_command_needs_no_launcher(alone, launched) -> None:
    assert len(rewards(alone)) == 3
    assert rewards(alone)[:2] == pytest.approx(rewards(launched[0]), abs=1e-5), "as by torchrun"

"""`colograd doctor` on the tiny model, with the real engine: report, unchanged environment, failures."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import launcher
import pytest
import tiny
import torch
import yaml
from paths import HELPERS

from colograd import GRPOTrainer
from colograd.apps import cli, doctor


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(HELPERS)  # the recipe names modules of this folder
    settings = tiny.recipe(tiny_model, output_dir=str(tmp_path / "out"), resume_from_checkpoint="auto")
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def lines(said: str) -> dict[str, str]:
    """Map each line's text before the first colon to the line."""
    return {line.split(":")[0]: line for line in said.splitlines()}


def test_what_triton_needs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda kind: str(tmp_path))
    monkeypatch.setenv("CC", "mycc")
    assert doctor.lacking_for_triton() == ["a C compiler (mycc)", f"{tmp_path / 'Python.h'} (python3-dev)"]
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/mycc")
    assert doctor.lacking_for_triton() == []


@pytest.mark.parametrize(("missing", "status"), [((), 0), (("vllm",), 1), (("cc",), 1)])
def test_installation_is_checked_without_opening_gpus(missing, status, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("opened a GPU"))
    monkeypatch.setattr(doctor.process, "gpu_nodes", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(doctor, "lacking_for_triton", lambda: [name for name in missing if name == "cc"])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name in missing else object())
    assert cli.main(["doctor"]) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: ") if status else last == "all is well"


def test_only_its_own_gpu_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command must not open other ranks' GPUs, because a CUDA context takes some hundred megabytes of memory."""
    opened: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: opened.append(index) or (2**30, 80 * 2**30))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for rank, own in ((None, 0), ("1", 1), ("5", 1)):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        opened.clear()
        gpus = [*doctor.devices()][1:]
        assert opened == [own]
        assert gpus[own] == f"GPU {own}: NVIDIA H100, memory 80.0 GiB, 1.0 free, CUDA 13.0"
        assert gpus[1 - own] == f"GPU {1 - own}: NVIDIA H100, memory 80.0 GiB, CUDA 13.0"


@pytest.mark.engine
def test_a_good_recipe_is_well_and_nothing_is_written(recipe: Path) -> None:
    """The doctor runs as a command line and reports a good recipe. Nothing is written."""
    done = launcher.run("colograd.apps.cli", "doctor", "--config", recipe, "--temperature", 0.9, cwd=HELPERS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = lines(done.stdout)
    assert f"torch {torch.__version__.split('+')[0]}" in found["versions"] and "vllm" in found["versions"]
    assert "cores" in found["processor"] and "memory of a rank" in found
    assert "  KV cache" in done.stdout and "adamw_torch" in found["policy"]
    results = [line for line in done.stdout.splitlines() if line.endswith(": ok")]
    assert [line.split(":")[0].split(",")[0] for line in results[-5:]] == [
        "memory",
        "weights",
        "sampler/trainer",
        "packed rows/the model's own forward",
        "rewards",
    ]
    assert "vowels 0." in found["rewards"] and "4 of 4 groups have differences" in found["rewards"]
    assert "Completions, of 64 tokens at most" in done.stdout
    assert done.stdout.splitlines()[-1] == "all is well"
    assert not (recipe.parent / "out").exists()


@pytest.mark.engine
def test_other_weights_and_a_reward_that_raises_fail_with_a_remedy(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    publish = GRPOTrainer.publish

    def wrong(self: GRPOTrainer) -> None:
        publish(self)
        with torch.no_grad():
            next(self.engine.model.parameters()).add_(0.05)

    monkeypatch.setattr(GRPOTrainer, "publish", wrong)
    flags = ["--weights", "copied", "--reward_funcs", "tiny:vowels", "reward_cases:raising"]
    assert cli.main(["doctor", "--config", str(recipe), *flags]) == 1
    said = capfd.readouterr().out
    found = lines(said)
    assert "1 parameters differ" in found["weights"] and "FAILED. Report the model" in found["weights"]
    assert "embed_tokens" in found["weights"]
    sampler = next(line for line in said.splitlines() if line.startswith("sampler/trainer"))
    assert "FAILED. Compare with --dtype float32 --bf16 false" in sampler
    assert found["packed rows/the model's own forward"].endswith(": ok"), "the trainer's side is right"
    assert "FAILED. reward function 'raising', prompt 0: it raised KeyError" in found["rewards"]
    assert re.search(r"\(reward_cases\.py:\d+\)", found["rewards"]) and "Traceback" not in said
    assert said.splitlines()[-1] == "3 checks FAILED"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_generation", "4"], "Unknown configuration key `num_generation`. Did you mean `num_generations`?"),
        (["--num_generations", "1"], "num_generations is 1"),
        (["--model_name_or_path", "./no/such/folder"], "neither a folder with a model nor a Hub model"),
    ],
)
def test_bad_input_is_the_one_line_that_training_gives(
    recipe: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    said = {}
    for command in ("doctor", "train"):
        assert cli.main([command, "--config", str(recipe), *flags]) == 2
        said[command] = capsys.readouterr().err
    ours = [line for line in said["doctor"].splitlines() if line.startswith("colograd: error: ")]
    assert len(ours) == 1 and message in ours[0] and "Traceback" not in said["doctor"]
    assert ours == [line for line in said["train"].splitlines() if line.startswith("colograd: error: ")]
    assert not (recipe.parent / "out").exists()


@pytest.mark.slow
@pytest.mark.engine
def test_ranks_that_share_rows_check_the_same_ones(recipe: Path) -> None:
    given = ("doctor", "--config", recipe, "--sequence_parallel_size", 2)
    done = launcher.run("colograd.apps.cli", *given, ranks=2, cwd=HELPERS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all is well" in done.stdout


def test_a_difference_is_judged_on_average_and_at_its_largest() -> None:
    def judged(*values: float) -> bool:
        return doctor._near("x", torch.tensor(values), 0.1, "Do this.").ok

    assert judged(0.1, 0.05) and judged(*[0.0] * 30, 1.9)
    assert not judged(0.15, 0.1) and not judged(*[0.0] * 30, 2.1) and not judged(float("nan"))
    line = doctor._near("x", torch.tensor([9.0]), 0.1, "Do this.").line()
    assert line.endswith("FAILED. Do this.") and "9 nats on average (at most 0.1 allowed)" in line


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    commands: list[Callable[[], int]] = [lambda: cli.main(["--help"]), lambda: cli.main(["doctor", "--help"])]
    assert [command() for command in commands] == [0, 0]
    assert "doctor --config" in capsys.readouterr().out

"""`make gpu-check` without a GPU: its checks, shares of time and page, and one check on the tiny model."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import psutil
import pytest
import tiny
import torch
from paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import gpu_check
import gpu_page
import training_path
from gpu_check import Check, Result

from colograd.extensions.recording import utilisation
from colograd.extensions.recording.utilisation import Matrices, Work

# -- FLOPs


def test_a_step_is_counted_as_its_packed_rows() -> None:
    """A prompt of 3 with completions of 2 and 4: 6 pairs in the prompt, 2 * 3 + 3 and 4 * 3 + 10 in the completions."""

    def row(prompt: int, *segments: tuple[int, int]) -> Any:
        parts = [SimpleNamespace(context=context, length=length) for context, length in segments]
        return SimpleNamespace(parts=[SimpleNamespace(rollouts=[SimpleNamespace(input=range(prompt), segments=parts)])])

    assert Work.of_rows([row(3, (3, 2), (3, 4))]) == Work(tokens=9, predicted=6, pairs=6 + 9 + 22)
    assert Work.of_rows([row(3, (3, 2), (3, 4)), row(1, (1, 1))]) == Work(tokens=11, predicted=7, pairs=37 + 1 + 2)


def test_flops_are_those_of_the_formula() -> None:
    work = Work(tokens=9, predicted=6, pairs=37)
    assert Matrices(trained=100, frozen=0, head=10, attention=8).flops(work) == 6 * 100 * 9 + 6 * 10 * 6 + 12 * 8 * 37
    adapted = Matrices(trained=5, frozen=100, head=10, attention=8, head_is_trained=False)
    assert adapted.flops(work) == (6 * 5 + 4 * 100) * 9 + 4 * 10 * 6 + 12 * 8 * 37


def test_matrices_are_those_that_multiply(tiny_model: Path, tiny_qwen: Path) -> None:
    """Matrices that multiply: without norms, biases, and an embedding table that isn't the head too."""
    from transformers import AutoModelForCausalLM

    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    for folder in (tiny_model, tiny_qwen):
        found = Matrices.of(AutoModelForCausalLM.from_pretrained(folder))
        assert found == Matrices(trained=2 * layer, frozen=0, head=258 * 64, attention=2 * 64)


@pytest.mark.parametrize("frozen", [False, True])
def test_torch_counts_as_many(tiny_qwen: Path, frozen: bool) -> None:
    """One sequence in which every token is predicted. Eager attention multiplies masked pairs too."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen, attn_implementation="eager")
    for name, parameter in model.named_parameters():  # the embeddings' gradient takes the backward to the first layer
        parameter.requires_grad_(not frozen or "embed" in name)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(1, 51)[None]).logits.sum().backward()
    matrices = Matrices.of(model)
    assert matrices is not None
    assert matrices.flops(Work(tokens=50, predicted=50, pairs=50 * 50)) == pytest.approx(
        counted.get_total_flops(), rel=1e-3
    )


def test_a_model_with_experts_has_no_figure() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    small = Qwen3MoeConfig(**sizes, intermediate_size=32, moe_intermediate_size=16, num_experts=2, vocab_size=64)
    assert Matrices.of(Qwen3MoeForCausalLM(small)) is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GH200 480GB", None),
        ("2 cores of AMD EPYC", None),
    ],
)
def test_peaks_are_known_by_name(device: str, peak: float | None) -> None:
    assert utilisation.peak_of(device) == peak


# -- what is run


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_check_is_a_command_that_exists(device: str) -> None:
    found = gpu_check.checks("M", "R", device)
    assert len({check.stem for check in found}) == len(found)
    for check in found:
        script = Path(check.command[0])
        if script.suffix == ".py":
            options = importlib.import_module(script.stem).parse([*check.command[1:], "--out", "F.json"])
            assert getattr(options, "model", "M") == "M" and options.out == Path("F.json")


def test_only_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.parse(["--only", "path", "doctor"]).only == ["path", "doctor"]
    with pytest.raises(SystemExit):
        gpu_check.parse(["--only", "doktor"])
    assert "'doktor', with which no check begins. There are: doctor, gpu tests" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told_what_to_do() -> None:
    without = {"cuda": False, "why": "", "machine": "2 cores"}
    assert "--device cpu" in gpu_check.unfit("cuda", without) and gpu_check.unfit("cpu", without) == ""
    assert gpu_check.unfit("cuda", without | {"why": "an old driver"}) == "an old driver"
    assert "leave --device cpu out" in gpu_check.unfit("cpu", without | {"cuda": True})


# -- time, failures


def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 600 s: the row that a call cuts off has no result, and the next call begins with it."""
    clock, begun = [0.0], []

    def run(check: Check, limit: float, folder: Path) -> Result:
        begun.append(check.name)
        seconds = min(250.0, limit)
        clock[0] += seconds
        return Result(check.name, "late" if seconds < 250 else "ok", "", seconds, limit)

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    wanted = [Check(name, (), 60.0, gpu_check.last_line) for name in "abcd"]
    results: list[Result] = []
    for _ in range(2):
        earlier = {result.name: result for result in results}
        results = gpu_check.run_all(wanted, earlier, 580, tmp_path, lambda results, new: None)
    assert begun == [*"abc", *"cd"] and [(each.name, each.status) for each in results] == [(n, "ok") for n in "abcd"]
    gpu_check.run_all(wanted, {}, 50, tmp_path, lambda results, new: None)
    assert len(begun) == 5, "too little time for any"


def test_failed_late_missing_checks_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str, code: str, **changes: Any) -> Check:
        told = {"tell": lambda said, figures: said.strip(), "writes": False} | changes
        return Check(name, ("-c", code), 1.0, **told)

    (tmp_path / "writes.json").write_text("{}")  # of an earlier run
    started = time.monotonic()
    # A worker that outlives its check would hold memory of the GPU.
    late = "import subprocess, time; print(subprocess.Popen(['sleep', '987']).pid, flush=True); time.sleep(987)"
    writes = "import json, sys; json.dump({'x': 1}, open(sys.argv[2], 'w')); print('noise\\n\\nTwo.\\n\\n| a |')"
    wanted = [
        check("fails", "raise ValueError('a rule and a remedy')"),
        check("missing", "1", needs="no_such_package"),
        check("writes", writes, writes=True, tell=lambda said, figures: f"x is {figures['x']}"),
        check("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        check("lacks", "print('well')", tell=lambda said, figures: figures["y"]),
    ]
    seen: list[int] = []
    found = {
        r.name: r for r in gpu_check.run_all(wanted, {}, 600, tmp_path, lambda results, new: seen.append(len(results)))
    }
    assert seen == [1, 2, 3, 4, 5]
    assert {name: result.status for name, result in found.items()} == {
        "fails": "failed", "missing": "skipped", "writes": "ok", "dies": "failed", "lacks": "ok",
    }  # fmt: skip
    assert found["fails"].said == "exit status 1: ValueError: a rule and a remedy"
    assert found["missing"].said == "no_such_package isn't installed"
    assert (found["writes"].said, found["writes"].figures, found["writes"].report) == (
        "x is 1",
        {"x": 1},
        "Two.\n\n| a |",
    )
    assert found["dies"].said.startswith("ended by signal 11") and "KeyError('y')" in found["lacks"].said
    hanging = gpu_check.run(check("late", late), 4.0, tmp_path)
    assert hanging.status == "late" and hanging.said.startswith("still running after 4 s")
    while lives(int((tmp_path / "late.out").read_text())):
        assert time.monotonic() - started < 500, "its worker goes on"
        time.sleep(0.1)


def lives(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def test_what_needs_two_gpus_is_skipped_with_one(tmp_path: Path) -> None:
    (overlap,) = (check for check in gpu_check.checks("M", "R", "cuda") if check.name == "overlap")
    skipped = gpu_check.run(gpu_check.on_machine(overlap, 1), 100, tmp_path)
    assert (skipped.status, skipped.said) == ("skipped", "it needs 2 GPUs")
    assert not gpu_check.missing(gpu_check.on_machine(overlap, 2))
    (tiny_form,) = (check for check in gpu_check.checks("M", "R", "cpu") if check.name == "overlap")
    assert not gpu_check.missing(gpu_check.on_machine(tiny_form, 0))


def test_the_reason_is_the_first_error() -> None:
    own = "[rank0]: Traceback\n[rank0]:   File x\n[rank0]: torch.OutOfMemoryError: CUDA out of memory\n"
    after = "subprocess.CalledProcessError: Command\n[rank0]:[W1 x.cpp] Warning: not destroyed\n"
    assert gpu_check.reason(own + after) == "torch.OutOfMemoryError: CUDA out of memory"
    assert gpu_check.reason(f"{own}training_path: no step had a gradient\n{after}").endswith("had a gradient")
    assert gpu_check.reason("one\ntwo\n\n") == "two"


# -- messages


FIGURES: dict[str, Any] = {
    "seconds": {"train": 0.2, "optimizer": 0.01, "sleep": 0.1, "wake": 0.2}, "tokens": 81920,
    "tokens_per_second": 409600.0, "flops": 6e13, "flops_per_second": 3e14, "utilisation": 0.3033,
    "peak": {"sampling": 3e9, "training": 9e9}, "given_back": 2e9,
    "planned": {"sampling": int(4e9), "training": int(1e10), "margin": int(6e9), "kv_bytes": int(2e9)},
    "difference": {"mean": 0.004, "max": 0.3, "allowed": 0.1},
}  # fmt: skip


def test_page_has_every_check_and_training_run() -> None:
    settings = {"machine": "NVIDIA H100", "model": "M", "versions": {"torch": "2.11"}, **vars(gpu_check.SIZES["cuda"])}
    results = [
        Result("training", "ok", gpu_check.tell_training("", FIGURES), 40, 100, FIGURES, "| its own |"),
        Result("publish", "ok", "fast", 60, 100, {"ways": {}}, "Two.\n\n| Weights |"),
        Result("path, LoRA", "ok", "", 20, 50, FIGURES | {"utilisation": None, "flops_per_second": None}),
        Result("doctor", "late", "still | running", 50, 50),
    ]
    said = gpu_page.page(settings, results)
    assert said.startswith("## NVIDIA H100\n\nM, torch 2.11. A step has 16 prompts of 512 tokens x 8 completions")
    assert "| training | ok | 409,600 tokens/s of training, 30.3% of the device's peak, sampler/trainer 0.0040" in said
    assert "| training | 0.200 | 0.010 | 81,920 | 409,600 | 300 | 30.3% | 3.00 (4.00) | 9.00 (10.00) |" in said
    assert "| LoRA | 0.200 | 0.010 | 81,920 | 409,600 | - | - |" in said
    assert "| doctor | LATE | still / running | 50 |" in said
    assert "### Publish\n\nTwo.\n\n| Weights |" in said and "its own" not in said


def test_what_is_wrong_with_a_run_is_said() -> None:
    steps = [{"loss": 0.1, "grad_norm": 1.0}] * 2
    assert training_path.faults(FIGURES, steps, on_gpu=True) == []
    bad = FIGURES | {
        "peak": {"sampling": 3e9, "training": 17e9}, "given_back": 1e9,
        "difference": {"mean": float("nan"), "allowed": 0.1},
    }  # fmt: skip
    apart, held, kept = training_path.faults(bad, steps, on_gpu=True)
    assert "differ by nan nats" in apart
    assert held == "17.00 GB at the peak of training, 10.00 planned and 6.00 kept free"
    assert kept == "a sleep gave 1.00 GB back of a cache of 2.00"
    assert training_path.faults(bad, steps, on_gpu=False) == [apart], "a process on a CPU holds more than is planned"
    lost = training_path.faults(FIGURES, [{"loss": float("inf"), "grad_norm": 0.0}], on_gpu=True)
    assert lost == ["loss isn't finite: [inf]", "no step had a gradient"]


# -- the real thing


def forked(command: Sequence[str], limit: float, out: Path, err: Path) -> int:
    """`gpu_check.execute`, as a fork of a process with all imports."""
    program, *arguments = command[1:] if command[0] == "-m" else command
    done = launcher.run(program, *arguments)
    out.write_text(done.stdout)
    err.write_text(done.stderr)
    return done.returncode


@pytest.mark.slow  # the tests above have the rows and the page of made-up results
@pytest.mark.engine
def test_cpu_check_writes_figures_and_page(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other checks' programs are run in tests/house/test_benchmarks.py."""
    monkeypatch.setattr(gpu_check, "execute", forked)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    command = ["--device", "cpu", "--model", str(tiny_model), "--out", str(tmp_path), "--only"]
    assert gpu_check.main([*command, "doctor"]) == 0
    status = gpu_check.main([*command, "doctor", "training"])
    said = capsys.readouterr().out
    assert status == 0 and said.count("doctor: ok") == 1, said
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    checks = {run["name"]: run for run in found["checks"]}
    assert {run["status"] for run in checks.values()} == {"ok"} and len(checks) == 2
    run = checks["training"]
    assert run["figures"]["faults"] == [] and run["figures"]["utilisation"] is None
    # Two prompts of 70 tokens, each with 4 completions of 16.
    assert {step["tokens"] for step in run["figures"]["steps"]} == {2 * (70 + 4 * 16)}
    assert run["figures"]["flops"] > 0 and 0 < run["figures"]["difference"]["mean"] < 0.1
    page = (tmp_path / "gpu_check.md").read_text()
    assert (
        page.startswith(f"## {found['settings']['machine']}")
        and all(f"| {name} | ok |" in page for name in checks)
        and page.strip() in said
    )


@pytest.mark.slow
@pytest.mark.engine
def test_on_a_cpu_all_checks_are_well(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=tiny.clean_environment(), timeout=4000)
    assert done.returncode == 0, done.stdout

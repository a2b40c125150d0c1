"""A GPU that torch can't use is an error with versions and a remedy. The run never falls back to the CPU silently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colograd import GRPOConfig
from colograd.runtime import process

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\nGCC version: gcc 12.2.0\n"
NEWEST = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one GPU, and a torch that sees none."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "version").write_text(PROPRIETARY)
    monkeypatch.setattr(process, "GPU_NODES", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.setattr(process, "GPU_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "535.129.03"), (OPEN, "550.54.14"), (NEWEST, "580.95")])
def test_the_driver_s_version(machine: Path, text: str, version: str) -> None:
    (machine / "version").write_text(text)
    assert f"(driver {version})" in process.why_gpu_unused("2.13", "13.0")


def test_an_old_driver_is_an_error_with_both_versions(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match=r"driver 535\.129\.03\), but .*CUDA 13\.0.*update the driver.*--use_cpu"):
        GRPOConfig(output_dir="unused")


def test_a_hidden_gpu_is_an_error_that_names_the_variable(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"535.*CUDA_VISIBLE_DEVICES is ''.*unset it; or set use_cpu: true"):
        GRPOConfig(output_dir="unused")


def test_a_torch_without_cuda_is_an_error_too(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    (machine / "version").unlink()
    with pytest.raises(ValueError, match=r"nvidia0 is a GPU, but torch .* is built without CUDA: install"):
        GRPOConfig(output_dir="unused")


def test_use_cpu_or_no_gpu_selects_the_cpu(machine: Path) -> None:
    assert GRPOConfig(output_dir="unused", use_cpu=True, report_to="none").on_cpu
    (machine / "nvidia0").unlink()
    assert GRPOConfig(output_dir="unused", report_to="none").on_cpu

"""The head's Triton kernels: values in Triton's interpreter, how often a tile is read, and code for GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import head_cases
import pytest
import torch
from paths import HELPERS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colograd.policy import head as policy_head

triton = pytest.importorskip("triton")

from colograd.policy import head_kernels  # noqa: E402

LABELS, VOCABULARY, HIDDEN = 64, 640, 8


def test_kernels_compute_what_torch_does() -> None:
    """The test has its own process, because Triton chooses its interpreter when it is imported."""
    command = [sys.executable, str(Path(HELPERS) / "head_cases.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert [json.loads(line) for line in done.stdout.splitlines()] == list(head_cases.CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", head_cases.CASES)
def test_a_gpu_s_kernels_compute_the_same(name: str) -> None:
    head_cases.check(head_cases.CASES[name], "cuda")


class Passes(TorchDispatchMode):
    """Records the operators that read or write a tensor of a tile's size."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if LABELS * VOCABULARY in sizes and not func.is_view:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return result


class Launches:
    """Replacement of a kernel that counts its launches."""

    count = 0

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        self.count += 1


def passes(monkeypatch: pytest.MonkeyPatch, kernels: Any, entropy: bool) -> tuple[list[str], list[str]]:
    """Name the operators of one tile's forward and backward."""
    monkeypatch.setattr(policy_head, "kernels_for", lambda *_: kernels)
    hidden, weight = (torch.randn(size, HIDDEN).bfloat16().requires_grad_() for size in (LABELS, VOCABULARY))
    labels, head = torch.randint(VOCABULARY, (LABELS,)), policy_head.Head(0.9, 1.0, 0.0, torch.bfloat16)
    with Passes() as forward:
        found = policy_head.label_logprobs(hidden, weight, None, labels, head, entropy)
    with Passes() as backward:
        torch.autograd.backward(found[: 1 + entropy], [torch.ones(LABELS)] * (1 + entropy))
    return forward.names, backward.names


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_a_kernel_reads_each_tile_once(monkeypatch: pytest.MonkeyPatch, entropy: bool) -> None:
    add, turn = Launches(), Launches()
    monkeypatch.setattr(head_kernels, "_add_tile", add)
    monkeypatch.setattr(head_kernels, "_turn_to_gradient", turn)
    assert passes(monkeypatch, head_kernels, entropy) == (["mm"], ["mm"] * 3)
    assert (add.count, turn.count) == (1, 1)
    assert [len(names) for names in passes(monkeypatch, None, entropy)] == [10, 12 if entropy else 10], "in torch"


def test_kernels_run_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, head = SimpleNamespace(is_cuda=True), policy_head.Head(1.0, 1.0, 0.0, torch.bfloat16)
    assert policy_head.kernels_for(torch.ones(1), head, None) is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for triton, expected in {True: head_kernels, False: None}.items():
        monkeypatch.setattr(policy_head, "has_triton", lambda found=triton: found)
        assert policy_head.kernels_for(gpu, head, None) is expected
    monkeypatch.setattr(policy_head, "has_triton", lambda: True)
    assert policy_head.kernels_for(gpu, head, SimpleNamespace()) is None  # a divergence from a teacher
    assert policy_head.kernels_for(gpu, dataclasses.replace(head, dtype=torch.float64), None) is None


KINDS = {"tile": "*bf16", "result": "*bf16", "hidden": "*i1", "labels": "*i64"}
KINDS |= dict.fromkeys(("columns", "first", "stride"), "i32") | dict.fromkeys(
    ("low", "before", "behind", "chain"), "fp32"
)


@pytest.mark.parametrize(("capability", "options"), [(80, True), (90, False)], ids=["sm_80, all", "sm_90, plain"])
@pytest.mark.parametrize("name", ["_add_tile", "_turn_to_gradient"])
def test_kernels_compile_for_gpus(
    name: str, capability: int, options: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows of aligned tiles are read 16 bytes at a time, and gradients are rounded to the nearest."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(head_kernels, name)
    constants = {"CAPPED": options, "BLOCK": head_kernels.BLOCK}
    constants |= {} if options else {of: None for of in ("hidden", "entropy") if of in kernel.arg_names}
    kinds = {of: "constexpr" if of in constants else KINDS.get(of, "*fp32") for of in kernel.arg_names}
    aligned = [index for index, (of, kind) in enumerate(kinds.items()) if kind[0] == "*" or of == "columns"]
    source = ASTSource(kernel, kinds, constants, {(index,): [["tt.divisibility", 16]] for index in aligned})
    code = compile(source, target=GPUTarget("cuda", capability, 32), options=head_kernels.OPTIONS).asm
    assert code["cubin"] and "ld.global.v4.b32" in code["ptx"]
    assert name == "_add_tile" or ("cvt.rn.bf16" in code["ptx"] and "st.global.v4.b32" in code["ptx"])

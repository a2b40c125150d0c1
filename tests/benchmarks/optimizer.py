"""Time a step of adamw_split, on a GPU also compiled, next to torch's AdamW on float32 parameters.

    python tests/benchmarks/optimizer.py [--model FOLDER | --shapes 49152x576 576x1536x30 ...] [--out F.json]

Parameters of a model's shapes, random values and float32 gradients. The contestants step in turns in one process, the
first step of each isn't counted, figures are medians. Prints a Markdown table. Exit status 1 if a compiled step takes
more than --limit times the faster of torch's two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import GB, PeakMemory, machine, table, write  # noqa: E402
from phases import ROOT, versions  # noqa: E402

from colograd.training.adamw_split import AdamWSplit  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SETTINGS = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
NAMES = {
    "split": "adamw_split",
    "compiled": "adamw_split, compiled",
    "foreach": "torch AdamW, float32, foreach",
    "fused": "torch AdamW, float32, fused",
}
Shape = tuple[int, ...]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="optimizer.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="folder or Hub id whose shapes are taken; default: SmolLM2")
    parser.add_argument("--shapes", nargs="+", metavar="NxM", help="these shapes instead, such as 4096x1024 4096")
    parser.add_argument("--steps", type=int, default=11, help="steps of each with the warm-up (11)")
    parser.add_argument("--limit", type=float, default=1.3, help="for a compiled step (1.3 times torch's)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures of every step as JSON")
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}, but the first only warms up: at least 2")
    return options


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """Return parameter shapes: a model's, with shared parameters once, or those of the options."""
    if options.shapes:
        return [tuple(int(size) for size in text.split("x")) for text in options.shapes]
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
    return [tuple(parameter.shape) for parameter in model.parameters()]


def contestants(shapes: Sequence[Shape]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers. They share gradients, and where they can parameters and state."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    gradients = [torch.randn(shape, device=device) for shape in shapes]
    found: dict[str, torch.optim.Optimizer] = {}
    ours = ("split", "compiled") if device == "cuda" else ("split",)
    for dtype, kinds in ((torch.bfloat16, ours), (torch.float32, ("foreach", "fused"))):
        parameters = [torch.nn.Parameter(0.02 * torch.randn(s, device=device, dtype=dtype)) for s in shapes]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if dtype == torch.bfloat16:
                parameter.grad_dtype = torch.float32
            parameter.grad = gradient
        if dtype == torch.bfloat16:
            found |= {kind: AdamWSplit(parameters, **SETTINGS, compiled=kind == "compiled") for kind in kinds}
        else:
            found |= {kind: torch.optim.AdamW(parameters, **SETTINGS, **{kind: True}) for kind in kinds}
        if dtype == torch.bfloat16 or device == "cpu":  # on a GPU torch's fused step counts its steps on the device
            found[kinds[-1]].state = found[kinds[0]].state
    return found


def step(optimizer: torch.optim.Optimizer) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state, without step counts."""
    return sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")


def measure(optimizers: dict[str, torch.optim.Optimizer], steps: int) -> dict[str, dict[str, Any]]:
    """Time all optimizers in turns. Peak memory counts only bytes that the steps add."""
    memory = PeakMemory()
    found: dict[str, dict[str, Any]] = {name: {"steps": [], "beyond_bytes": 0} for name in optimizers}
    for optimizer in optimizers.values():
        step(optimizer)  # compiles, and makes the optimizer's state
    for _ in range(steps - 1):
        for name, optimizer in optimizers.items():
            memory.reset()
            before = memory.now()
            found[name]["steps"].append(step(optimizer))
            found[name]["beyond_bytes"] = max(found[name]["beyond_bytes"], memory.peak() - before)
    for name, optimizer in optimizers.items():
        parameters = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        found[name]["step_s"] = statistics.median(found[name]["steps"])
        found[name]["state_bytes_per_parameter"] = state_bytes(optimizer) / parameters
    return found


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return seconds of each adamw_split over the faster of torch's."""
    fastest = min(found[name]["step_s"] for name in ("foreach", "fused"))
    return {name: found[name]["step_s"] / fastest for name in ("split", "compiled") if name in found}


def report(found: dict[str, dict[str, Any]], shapes: Sequence[Shape]) -> str:
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    steps = len(found["split"]["steps"])
    fastest = min(found[name]["step_s"] for name in ("foreach", "fused"))
    rows = [
        [
            NAMES[name],
            f"{1000 * figures['step_s']:.1f}",
            f"{figures['step_s'] / fastest:.2f}",
            f"{figures['state_bytes_per_parameter']:g}",
            f"{figures['beyond_bytes'] / GB:.3f}",
        ]
        for name, figures in found.items()
    ]
    header = ["A step", "ms", "of torch's faster", "state, bytes a parameter", "GB beyond the state"]
    return (
        f"{parameters / 1e6:,.1f} M parameters in {len(shapes)} tensors, medians of {steps} steps in turns, on "
        f"{machine()}\n\n{table(header, rows)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    shapes = shapes_of(options)
    found = measure(contestants(shapes), options.steps)
    ratio = ratios(found)
    print(report(found, shapes))
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    settings |= {"machine": machine(), "threads": torch.get_num_threads(), "versions": versions()}
    write(options.out, {"settings": settings, "variants": found, "ratio": ratio})
    if ratio.get("compiled", 0.0) > options.limit:
        print(f"\noptimizer: a compiled step takes {ratio['compiled']:.2f} times torch's: over {options.limit}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

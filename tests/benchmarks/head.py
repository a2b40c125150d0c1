"""Log-probabilities and entropies of a head: time of the forward, and with the backward, of several versions in turns.

    python tests/benchmarks/head.py [--labels 2048] [--hidden 896] [--vocabulary 151936] [--entropy] [--other HEAD.py]

Versions: this checkout's; on a GPU also its torch code, without the kernels; and --other, the file
`colograd/policy/head.py` of another checkout. Medians of milliseconds: on a CPU of processor time, because other
processes disturb the wall clock. It also prints the largest difference of each
value and gradient.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import versions  # noqa: E402

from colograd.policy import head as policy_head  # noqa: E402

Run = Callable[[], dict[str, torch.Tensor]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="head.py", description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=int, default=2048, help="rows of hidden states (2048)")
    parser.add_argument("--hidden", type=int, default=896, help="width of the hidden states (896)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="rows of the head (151936)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--entropy", action="store_true", help="train the entropy too")
    parser.add_argument("--other", type=Path, metavar="HEAD.py", help="colograd/policy/head.py of another checkout")
    parser.add_argument("--trials", type=int, default=5, help="of each, in turns (5)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def load(path: Path) -> ModuleType:
    """Load another version of the module into this checkout's package."""
    spec = importlib.util.spec_from_file_location("colograd.policy.other_head", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(module: Any, options: argparse.Namespace, backward: bool) -> Run:
    """Return one version's pass over inputs that all versions share."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, generator = getattr(torch, options.dtype), torch.Generator().manual_seed(0)
    sizes = {"hidden": (options.labels, options.hidden), "weight": (options.vocabulary, options.hidden)}
    given: Any = {name: torch.randn(size, generator=generator).to(device, dtype) for name, size in sizes.items()}
    given["weight"].mul_(options.hidden**-0.5)
    labels = torch.randint(options.vocabulary, (options.labels,), generator=generator).to(device)
    how = module.Head(1.0, 1.0, 0.0, module.product_dtype(given["weight"], device, False))

    def run() -> dict[str, torch.Tensor]:
        states, weight = (value.detach().requires_grad_(backward) for value in given.values())
        logprob, entropy = module.label_logprobs(states, weight, None, labels, how, options.entropy)
        if not backward:
            return {"log-probability": logprob, "entropy": entropy}
        (logprob.sum() + (entropy.sum() if options.entropy else 0)).backward()
        return {"gradient of the states": states.grad, "gradient of the head": weight.grad}

    return run


def clock() -> float:
    """Milliseconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return 1e3 * time.perf_counter()
    return 1e3 * time.process_time()


def measured(ways: dict[str, Run], trials: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median milliseconds of each way, and the largest differences from the first way's results."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, torch.Tensor] = {}
    differences: dict[str, float] = {}
    for _ in range(trials + 1):  # the first one warms up
        for name, run in ways.items():
            started = clock()
            found = run()
            times[name].append(clock() - started)
            results = results or found
            for of, value in found.items():
                differences[of] = max(differences.get(of, 0.0), float((value - results[of]).abs().max()))
    return {name: statistics.median(each[1:]) for name, each in times.items()}, differences


def in_torch(run: Run) -> Run:
    def other() -> dict[str, torch.Tensor]:
        with mock.patch.object(policy_head, "kernels_for", lambda *_: None):
            return run()

    return other


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.keep_freed_memory()  # as in a run
    rows, all_differences, figures = [], {}, {}
    for backward in (False, True):
        ways = {"colograd": make(policy_head, options, backward)}
        if torch.cuda.is_available():
            ways["torch"] = in_torch(ways["colograd"])
        if options.other:
            ways["other"] = make(load(options.other), options, backward)
        name = "forward and backward" if backward else "forward"
        figures[name], differences = measured(ways, options.trials)
        all_differences |= differences
        rows.append([name, *(f"{each:.0f}" for each in figures[name].values())])
    print(
        f"{options.labels:,} labels, head of {options.vocabulary:,} x {options.hidden}, {options.dtype}, "
        f"entropy {'trained' if options.entropy else 'constant'}, on {machine()}; milliseconds\n"
    )
    print(table(["", *figures["forward"]], rows))
    print("\nLargest difference: " + ", ".join(f"{name} {each:.1e}" for name, each in all_differences.items()))
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "out"}
    write(options.out, {"settings": settings | {"versions": versions()}, "ms": figures, "differences": all_differences})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""bfloat16 products of a linear layer on this CPU: torch's own, Colograd's (`runtime/cpu_products.py`), and float32's.

    python tests/benchmarks/cpu_products.py [--rows 4 32 256] [--layers 576x1536 576x49152] [--out F.json]

Milliseconds, the median of each in turns: a product, and a product with both gradients. On a CPU with bfloat16
instructions Colograd takes torch's, and the ratio is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import versions  # noqa: E402

from colograd.runtime import cpu_products  # noqa: E402

WAYS: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype]] = {
    "torch": (torch.nn.functional.linear, torch.bfloat16),
    "colograd": (cpu_products.linear, torch.bfloat16),
    "float32": (torch.nn.functional.linear, torch.float32),
}


def measured(rows: int, inputs: int, outputs: int, backward: bool, trials: int) -> dict[str, float]:
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)

    def once(linear: Callable[..., torch.Tensor], dtype: torch.dtype) -> float:
        given = [tensor.to(dtype).requires_grad_(backward) for tensor in (x, weight)]
        of_product, start = gradient.to(dtype), time.perf_counter()
        product = linear(*given)
        if backward:
            product.backward(of_product)
        return 1e3 * (time.perf_counter() - start)

    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(trials + 1):  # the first one warms up
        for name, way in WAYS.items():
            seconds[name].append(once(*way))
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cpu_products.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 32, 256], help="of the input (4 32 256)")
    parser.add_argument("--layers", nargs="+", default=["576x1536", "576x49152"], metavar="INxOUT")
    parser.add_argument("--trials", type=int, default=3, help="of each, in turns (3)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    for layer in options.layers:
        inputs, outputs = map(int, layer.split("x"))
        for rows in options.rows:
            for backward in (False, True):
                figures = measured(rows, inputs, outputs, backward, options.trials)
                found.append({"layer": layer, "rows": rows, "backward": backward, "ms": figures})
    lines = [
        [one["layer"], str(one["rows"]), "yes" if one["backward"] else "", *(f"{ms:.1f}" for ms in one["ms"].values()),
         f"{one['ms']['torch'] / one['ms']['colograd']:.1f}"]
        for one in found
    ]  # fmt: skip
    asked = "wanted" if cpu_products.wanted() else "not wanted"
    print(f"{machine()}, {torch.get_num_threads()} thread(s), bfloat16 products in float32 are {asked} here\n")
    print(table(["layer", "rows", "with gradients", *(f"{name} ms" for name in WAYS), "torch / colograd"], lines))
    write(options.out, {"machine": machine(), "versions": versions(), "figures": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())

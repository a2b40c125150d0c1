"""`side_by_side.py` over a grid of group sizes and lengths: is there a corner where TRL wins?

    python tests/benchmarks/grid.py [--num-generations 2 8] [--prompt-tokens 16 200 800] [--completion-tokens 16 256]
                                    [--prompts-per-step 2] [--steps 1] [--out F.json]

Every cell is a comparison of its own: one process of each trainer, the first step of each not counted. TRL's
micro-batches are as large as --tokens-per-microbatch allows, so that long rows fit in memory. Prints a Markdown table
of ratios, TRL over colograd. Exit status 1 if one of them is below 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

HERE = Path(__file__).resolve().parent


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grid.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder or Hub id")
    parser.add_argument("--num-generations", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[16, 200, 800])
    parser.add_argument("--completion-tokens", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--prompts-per-step", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="counted optimizer steps (1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens-per-microbatch", type=int, default=5000, help="of TRL, padding included (5000)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def rows_per_microbatch(completions: int, length: int, tokens: int) -> int:
    """Return the largest divisor of ``completions`` whose rows have at most ``tokens`` tokens."""
    fitting = [n for n in range(1, completions + 1) if completions % n == 0 and n * length <= tokens]
    return max(fitting, default=1)


def compare(cell: tuple[int, int, int], options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return the figures of side_by_side.py for a cell (G, prompt tokens, new tokens)."""
    generations, prompt, new = cell
    rows = rows_per_microbatch(generations * options.prompts_per_step, prompt + new, options.tokens_per_microbatch)
    given = {
        "model": options.model,
        "num-generations": generations,
        "prompt-tokens": prompt,
        "completion-tokens": new,
        "prompts-per-step": options.prompts_per_step,
        "steps": options.steps,
        "repeats": 0,
        "dtype": options.dtype,
        "rows-per-microbatch": rows,
        "out": out,
    }
    command = [sys.executable, str(HERE / "side_by_side.py"), *(f"--{name}={value}" for name, value in given.items())]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def report(cells: Sequence[dict[str, Any]], table: Any) -> str:
    rows = []
    for cell in cells:
        settings, ratio, ours = cell["settings"], cell["ratio"], cell["trainers"]["colograd"]
        rows.append(
            [
                *(str(settings[name]) for name in ("num_generations", "prompt_tokens", "completion_tokens")),
                f"{ours['completion_tokens']:.0f}",
                *(f"{ratio[name]:.1f}" for name in ("tokens", "train", "step", "memory")),
            ]
        )
    header = ["G", "prompt tokens", "new tokens, at most", "mean", "tokens", "training, s", "step, s", "memory"]
    return table(header, rows)  # type: ignore[no-any-return]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    from figures import machine, table, write

    cells = []
    with tempfile.TemporaryDirectory(prefix="colograd-grid-") as folder:
        grid = itertools.product(options.num_generations, options.prompt_tokens, options.completion_tokens)
        for index, cell in enumerate(grid):
            cells.append(compare(cell, options, Path(folder) / f"{index}.json"))
            write(options.out, {"cells": cells})  # a later cell may fail
    print(f"{Path(options.model).name}, {options.dtype}, {machine()}, {options.prompts_per_step} prompts a step\n")
    print(report(cells, table))
    low = [c["settings"] for c in cells if min(c["ratio"].values()) < 1]
    for settings in low:
        print(f"\ngrid: TRL is ahead somewhere at {settings}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())

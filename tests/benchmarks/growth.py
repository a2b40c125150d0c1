"""How a step's cost grows with tokens, prompts, completions and ranks: host seconds, bytes and forwards per token.

    python tests/benchmarks/growth.py [--prompts 16] [--completions 8] [--tokens 512] [--ranks 1,8,64] [--out F.json]

Each case of the first table is a step of `scale.py` in a process of its own: made-up completions go the trainer's way
on the host. The second table simulates ranks that don't exist: it plans which rank trains which group, from lognormal
lengths, and counts the groups that a rank sends and receives. A cost per token that rises from row to row grows faster
than the tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scale
from figures import machine, table, write

from colograd.parallel import balance

FACTORS = {"tokens": (1, 4, 16), "prompts": (1, 4), "completions": (0.5, 1, 2, 4)}


def cases(options: argparse.Namespace) -> list[dict[str, int]]:
    """Return sizes of steps. One size at a time grows from the smallest step."""
    base = {name: getattr(options, name) for name in FACTORS}
    return [base | {name: round(factor * base[name])} for name, factors in FACTORS.items() for factor in factors]


def host_step(sizes: dict[str, int]) -> dict[str, Any]:
    """Run one step on the host. ``forwards`` are micro-batches of at most `scale.BUDGET` tokens."""
    options = argparse.Namespace(**sizes, ranks=1, log=True, out=None)
    found = scale.run(options, sizes["prompts"])
    cpu = found["total"][1]
    return sizes | {
        "step_tokens": found["tokens"],
        "cpu_us": 1e6 * cpu / found["tokens"],
        "bytes": found["bytes"],
        "packed": found["packed"] / found["tokens"],
        "forwards": found["forwards"],
    }


def moves(ranks: int, groups: int, seed: int = 0) -> dict[str, Any]:
    """Plan a step on ``ranks`` ranks. Return milliseconds, and the most groups that a rank sends and receives."""
    draw = random.Random(seed)
    costs = [[draw.lognormvariate(0.0, 0.6) for _ in range(groups)] for _ in range(ranks)]
    before = time.process_time()
    assignment = balance.plan(costs)
    seconds = time.process_time() - before
    sent = [0] * ranks
    for trainer, row in enumerate(assignment):
        for owner, _ in row:
            sent[owner] += owner != trainer
    received = [sum(owner != trainer for owner, _ in row) for trainer, row in enumerate(assignment)]
    loads = [sum(costs[owner][index] for owner, index in row) for row in assignment]
    idle = 1 - sum(loads) / len(loads) / max(loads)
    return {"ranks": ranks, "ms": 1e3 * seconds, "sent": max(sent), "received": max(received), "idle": idle}


def report(steps: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]], groups: int) -> str:
    rows = [
        [f"{one['prompts']} x {one['completions']} x {one['tokens']:,}", f"{one['step_tokens'] / 1e6:.2f}",
         f"{one['cpu_us']:.2f}", f"{one['bytes']:.0f}", f"{one['packed']:.2f}", f"{one['forwards']:,}",
         f"{1e6 * one['forwards'] / one['step_tokens']:.0f}"]
        for one in steps
    ]  # fmt: skip
    head = ["prompts x completions x longest", "M tokens", "host, µs per token", "bytes per token at the peak",
            "tokens through the model per sampled one", "forwards", "forwards per M tokens"]  # fmt: skip
    of_ranks = [
        [f"{one['ranks']:,}", f"{one['ms']:.1f}", str(one["sent"]), str(one["received"]), f"{100 * one['idle']:.0f} %"]
        for one in ranks
    ]
    columns = ["ranks", "plan, ms", "groups sent at most", "received at most", "idle after it"]
    return "\n\n".join(
        [f"One rank on {machine()}", table(head, rows), f"{groups} groups a rank", table(columns, of_ranks)]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="growth.py", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="of the smallest step (16)")
    parser.add_argument("--completions", type=int, default=8, help="per prompt (8)")
    parser.add_argument("--tokens", type=int, default=512, help="of the longest completion (512)")
    parser.add_argument("--ranks", default="1,8,64", help="simulated (1,8,64)")
    parser.add_argument("--groups", type=int, default=8, help="of a simulated rank (8)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    steps = [host_step(sizes) for sizes in cases(options)]
    ranks = [moves(int(count), options.groups) for count in options.ranks.split(",")]
    print(report(steps, ranks, options.groups), flush=True)
    write(options.out, {"steps": steps, "ranks": ranks})
    return 0


if __name__ == "__main__":
    sys.exit(main())

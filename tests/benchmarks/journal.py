"""Cost of a large step's journal: bytes per token, speed, memory, and seconds of the rank's main thread.

    python tests/benchmarks/journal.py --prompts 256 --completions 16 --tokens 8192

Tokens and log-probabilities are made up: ids of a text's frequencies (Zipf), log-probabilities of a sampler's spread.
Groups come one after the other, as fast as they are made, which is far faster than an engine writes them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import OwnMemory, machine, table, write

from colograd.batch import FinishReason, Group, Logged, ModelInput, Prompt, Rollout
from colograd.rollout.store import RewardedGroup, RolloutStore


def made_up(options: argparse.Namespace, position: int) -> RewardedGroup:
    draw = np.random.default_rng(position)
    asked = ModelInput(tuple(draw.integers(0, 50_000, 200).tolist()))
    rollouts = []
    for _ in range(options.completions):
        length = int(draw.integers(options.tokens // 2, options.tokens + 1))
        ids = np.minimum(draw.zipf(1.2, length), 150_000).astype(np.int32)
        logprobs = torch.from_numpy(-draw.exponential(0.4, length).astype(np.float32))
        rollouts.append(
            Rollout(
                asked, array("i", ids.tobytes()), logprobs, torch.ones(length, dtype=torch.bool), FinishReason.STOP, 0
            )
        )
    group = Group({"prompt": f"question {position}"}, tuple(rollouts), position)
    return RewardedGroup(group, torch.rand(options.completions, 1), Logged({}, {}))


def bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*.records"))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        journal = RolloutStore(folder, 0, {})
        journal.begin(0, "")
        journal.add(made_up(options, 0))  # imports, threads
        memory = OwnMemory()
        before = memory.resident
        memory.start()
        tokens, own, largest = 0, 0.0, 0
        written = bytes_in(folder)
        for position in range(1, options.prompts + 1):
            group = made_up(options, position)
            size = sum(len(rollout.completion_ids) for rollout in group.group.rollouts)
            tokens, largest = tokens + size, max(largest, 8 * size)
            started = time.perf_counter()
            journal.add(group)
            own += time.perf_counter() - started
        written = bytes_in(folder) - written
        peak = memory.resident - before
        prompts = [Prompt({"prompt": f"question {p}"}, ModelInput((1,)), p) for p in range(1, options.prompts + 1)]
        journal.begin(0, "")
        began = time.perf_counter()
        for prompt in prompts:
            journal.recall([prompt])
        read = time.perf_counter() - began
        journal.close()
    return {
        "tokens": tokens, "bytes": written, "write_s": own, "read_s": read, "peak_bytes": peak,
        "largest_group_bytes": largest,
    }  # fmt: skip


def report(found: dict[str, Any]) -> str:
    tokens = found["tokens"]
    rows = [
        ["bytes per token, on the disk", f"{found['bytes'] / tokens:.2f}"],
        ["writing, us of the rank's time per token", f"{1e6 * found['write_s'] / tokens:.3f}"],
        ["MB/s of what is written", f"{found['bytes'] / found['write_s'] / 1e6:.0f}"],
        ["reading, us per token", f"{1e6 * found['read_s'] / tokens:.3f}"],
        ["memory at the peak, MB", f"{found['peak_bytes'] / 1e6:.0f}"],
        ["the largest group's tokens and log-probabilities, MB", f"{found['largest_group_bytes'] / 1e6:.1f}"],
    ]  # fmt: skip
    return f"{tokens / 1e6:.1f} M tokens on {machine()}\n\n{table(['journal', ''], rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="journal.py", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192, help="of the longest completion (8192)")
    parser.add_argument("--folder", type=Path, help="where to write (the system's temporary folder)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    found = measure(options)
    print(report(found))
    write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

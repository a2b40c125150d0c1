"""Attention of one group's row, forward and backward: the prompt's keys copied for each completion, and read in place.

    python tests/benchmarks/attention.py [--prompts 45 200 800 2000] [--completions 64 512] [--groups 8 16]
        [--dtypes float32 bfloat16] [--heads 9 3 64] [--trials 9] [--out F.json]

On a CPU processor seconds of one thread, on a GPU seconds by its own clock, in turns: milliseconds of both ways, the
median of the pairs' ratios, and the bytes that the backward keeps in addition to the row's queries, keys and values.
Copied is one call per segment on a CPU, and one flash call over gathered keys on a GPU. On a CPU without bfloat16
products there is a third way for bfloat16: in place, with torch's own backward. Made-up completions have between an
eighth of --completions and --completions tokens. Exit status 1 where two disagree.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import versions  # noqa: E402

from colograd.batch import SegmentLayout  # noqa: E402
from colograd.policy import attention, merged_attention  # noqa: E402
from colograd.policy.merged_attention import calls_at_once, calls_one_by_one  # noqa: E402

ALLOWED = {"float32": 1e-4, "bfloat16": 0.05}  # relative differences of outputs and gradients
MIB = 2**20
EVERYTHING = 2**30  # tokens of a window that hides nothing
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SegmentLayout], torch.Tensor]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attention.py", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", type=int, default=[45, 200, 800, 2000], help="tokens")
    parser.add_argument("--completions", nargs="+", type=int, default=[64, 512], help="tokens at most")
    parser.add_argument("--groups", nargs="+", type=int, default=[8, 16], help="completions of a prompt")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(ALLOWED), help="default: both, on a GPU bfloat16")
    parser.add_argument("--heads", nargs=3, type=int, default=[9, 3, 64], metavar=("Q", "KV", "SIZE"))
    parser.add_argument("--trials", type=int, default=9, help="of each, in turns (9)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def copied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout) -> torch.Tensor:
    if query.is_cuda:
        return attention.run_merged(query, key, value, calls_at_once(layout, EVERYTHING, query.device), None)
    return attention._segment_attention(query, key, value, layout, (None, 0.0, None), None)


def in_place(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout) -> torch.Tensor:
    calls = calls_at_once(layout, None, query.device) if query.is_cuda else calls_one_by_one(layout)
    return attention.run_merged(query, key, value, calls, None)


def torchs_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout) -> torch.Tensor:
    return in_place(query, key, value, layout)


def clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def once(attend: Attention, row: Sequence[torch.Tensor], gradient: torch.Tensor, layout: SegmentLayout) -> Any:
    """Run forward and backward once. Return the seconds, the kept bytes, and the output with all gradients."""
    inputs = [x.detach().requires_grad_() for x in row]
    own, kept = {x.untyped_storage().data_ptr() for x in inputs}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    started = clock(gradient.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = attend(*inputs, layout)
    with mock.patch.object(merged_attention, "slow", lambda _: False) if attend is torchs_backward else nullcontext():
        output.backward(gradient)
    seconds = clock(gradient.device) - started
    kept.pop(output.untyped_storage().data_ptr(), None)  # the next layer keeps it anyway
    return seconds, sum(kept.values()), [output.detach(), *(x.grad for x in inputs)]


def cell(dtype: str, prompt: int, completion: int, group: int, options: argparse.Namespace) -> dict[str, Any]:
    device, draw = torch.device("cuda" if torch.cuda.is_available() else "cpu"), random.Random(0)
    lengths = [draw.randint(-(-completion // 8), completion) for _ in range(group)]
    layout = SegmentLayout((prompt, *lengths), ((), *((0,),) * group))
    queries, keys, size = options.heads
    made = torch.Generator().manual_seed(0)
    row = [  # as projections leave them
        torch.randn(1, layout.num_tokens, heads, size, generator=made).to(device, getattr(torch, dtype)).transpose(1, 2)
        for heads in (queries, keys, keys)
    ]
    gradient = torch.randn(1, layout.num_tokens, queries, size, generator=made).to(device, row[0].dtype)
    ways = [copied, in_place, *([torchs_backward] if merged_attention.slow(gradient) else [])]
    turns = [[once(attend, row, gradient, layout) for attend in ways] for _ in range(options.trials + 1)]
    one, other, *_ = turns[0]
    pairs = itertools.chain.from_iterable(zip(one[2], found[2], strict=True) for found in turns[0][1:])
    apart = max(float((a - b).float().norm() / a.float().norm()) for a, b in pairs)
    seconds = [[found[0] for found in turn] for turn in turns[1:]]
    return {
        "dtype": dtype, "prompt": prompt, "completion": completion, "group": group, "tokens": layout.num_tokens,
        "copied_ms": 1000 * statistics.median(a for a, *_ in seconds),
        "in_place_ms": 1000 * statistics.median(b for _, b, *_ in seconds),
        "ratio": statistics.median(a / b for a, b, *_ in seconds),
        "torchs_ms": 1000 * statistics.median(c for _, _, c in seconds) if len(ways) == 3 else None,
        "copied_bytes": one[1], "in_place_bytes": other[1], "apart": apart,
    }  # fmt: skip


HEADER = (
    "", "prompt", "completions, at most", "G", "copied, ms", "in place, ms", "ratio", "torch's backward, ms",
    "copied keeps, MiB", "in place",
)  # fmt: skip


def row_of(found: dict[str, Any]) -> list[str]:
    return [
        found["dtype"], *(str(found[name]) for name in ("prompt", "completion", "group")),
        f"{found['copied_ms']:.1f}", f"{found['in_place_ms']:.1f}", f"{found['ratio']:.2f}",
        "" if found["torchs_ms"] is None else f"{found['torchs_ms']:.1f}",
        f"{found['copied_bytes'] / MIB:.1f}", f"{found['in_place_bytes'] / MIB:.1f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    on_gpu = torch.cuda.is_available()
    process.keep_freed_memory()  # as the trainer does
    torch.set_num_threads(1)
    print(f"{machine()}: attention of one layer, {options.heads[0]} heads of {options.heads[2]}, "
          f"{options.heads[1]} for keys; {'seconds' if on_gpu else 'processor seconds of one thread'}\n")  # fmt: skip
    print(table(HEADER, []), flush=True)
    cells = []
    for dtype in options.dtypes or (["bfloat16"] if on_gpu else list(ALLOWED)):
        for completion, group, prompt in itertools.product(options.completions, options.groups, options.prompts):
            cells.append(cell(dtype, prompt, completion, group, options))
            print("| " + " | ".join(row_of(cells[-1])) + " |", flush=True)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    write(options.out, {"settings": settings, "machine": machine(), "versions": versions(), "cells": cells})
    wrong = [found for found in cells if not found["apart"] <= ALLOWED[found["dtype"]]]
    for found in wrong:
        print(f"attention: {found['dtype']}, prompt {found['prompt']}: {found['apart']:.2g} apart", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

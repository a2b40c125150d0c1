"""Memory of log-probabilities and their backward, beyond the hidden states and the head's own gradient.

    python tests/benchmarks/logprobs_memory.py [--labels 8192] [--vocabulary 151936] [--hidden 896] [--out F.json]

Compares `colograd.logprobs` with all logits at once in float32, each in a process of its own. The latter is measured
with as many labels as fit (--full-labels), and scaled to --labels: its memory grows in proportion to the labels. Prints
a Markdown table. Exit status 1 if ours needs more than --limit gigabytes (10**9 bytes).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from figures import GB, PeakMemory, machine, table, write
from phases import versions

from colograd.policy import head as policy_head
from colograd.runtime import process
from colograd.training.adamw_split import accumulate_in_float32

PLAIN = {"scale": 1.0, "softcap": 0.0}


@dataclasses.dataclass(frozen=True)
class Head:
    """Inputs: hidden states (N, H), weight (V, H), labels (N,)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def random(cls, labels: int, vocabulary: int, hidden: int, dtype: torch.dtype) -> Head:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        states = torch.randn(labels, hidden, device=device, dtype=dtype).requires_grad_()
        weight = torch.nn.Parameter(torch.randn(vocabulary, hidden, device=device, dtype=dtype).mul_(hidden**-0.5))
        accumulate_in_float32([weight])
        return cls(states, weight, torch.randint(vocabulary, (labels,), device=device))


def in_tiles(head: Head) -> torch.Tensor:
    how = policy_head.Head(1.0, 1.0, 0.0, policy_head.product_dtype(head.weight, head.weight.device, False))
    return policy_head.label_logprobs(head.hidden, head.weight, None, head.labels, how)[0]


def all_at_once(head: Head) -> torch.Tensor:
    logits = torch.nn.functional.linear(head.hidden, head.weight).float()
    return logits.log_softmax(dim=-1).gather(1, head.labels[:, None]).squeeze(1)


VARIANTS: dict[str, Callable[[Head], torch.Tensor]] = {"tiles": in_tiles, "full": all_at_once}
NAMES = {"tiles": "colograd", "full": "all logits in float32"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="logprobs_memory.py", description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=int, default=8192, help="completion tokens of the micro-batch (8192)")
    parser.add_argument("--full-labels", type=int, default=1024, help="labels for all logits at once (1024)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="rows of the head (151936)")
    parser.add_argument("--hidden", type=int, default=896, help="width of the hidden states (896)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--limit", type=float, default=0.3, help="gigabytes that ours may need (0.3)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    parser.add_argument("--variant", choices=tuple(VARIANTS), help=argparse.SUPPRESS)  # for child processes
    return parser.parse_args(argv)


def measure(variant: str, labels: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one forward and backward. Return seconds, and bytes beyond inputs and head gradient."""
    if variant == "tiles" and not torch.cuda.is_available():
        process.keep_freed_memory()  # as in a run on a CPU
    dtype, run, memory = getattr(torch, options.dtype), VARIANTS[variant], PeakMemory()
    run(Head.random(16, 64, options.hidden, dtype)).sum().backward()  # so that libraries' memory doesn't count
    head = Head.random(labels, options.vocabulary, options.hidden, dtype)
    memory.reset()
    before, started = memory.now(), time.perf_counter()
    run(head).sum().backward()
    peak, seconds = memory.peak(), time.perf_counter() - started
    assert head.weight.grad is not None
    gradient = head.weight.grad.numel() * head.weight.grad.element_size()
    return {
        "labels": labels,
        "beyond_bytes": peak - before - gradient,
        "head_gradient_bytes": gradient,
        "seconds": seconds,
        "exact": memory.exact,
    }


def measure_apart(variant: str, labels: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--variant", variant, "--labels", str(labels), "--dtype", options.dtype]
    command += ["--vocabulary", str(options.vocabulary), "--hidden", str(options.hidden)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def full_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Return the memory of all logits at once, measured, or extrapolated from two smaller measurements."""
    most = min(options.full_labels, options.labels)
    large = measure_apart("full", most, options)
    if most == options.labels:
        return {**large, "measured": True}
    small = measure_apart("full", most // 2, options)
    steps = (options.labels - most) / (most - most // 2)
    line = {key: large[key] + steps * (large[key] - small[key]) for key in ("beyond_bytes", "seconds")}
    return {**large, **line, "labels": options.labels, "measured": False, "measurements": [small, large]}


def report(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    lines = [
        f"Head of {options.vocabulary:,} x {options.hidden}, {options.dtype}, {options.labels:,} labels, forward and "
        f"backward, on {machine()}; gigabytes (10^9 bytes) beyond the hidden states and the head's gradient "
        f"({found['tiles']['head_gradient_bytes'] / GB:.2f})",
        "",
    ]
    rows = []
    for variant, figures in found.items():
        note = "" if figures["measured"] else f" (extended from {options.full_labels:,} labels)"
        rows.append([NAMES[variant] + note, f"{figures['beyond_bytes'] / GB:.2f}", f"{figures['seconds']:.1f}"])
    return "\n".join([*lines, table(["Log-probabilities", "GB", "Seconds"], rows)])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.prepare_threads()
    if options.variant:
        print(json.dumps(measure(options.variant, options.labels, options)))
        return 0
    found = {
        "tiles": {**measure_apart("tiles", options.labels, options), "measured": True},
        "full": full_figures(options),
    }
    print(report(found, options))
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "variant")}
    write(options.out, {"settings": {**settings, "machine": machine(), "versions": versions()}, "variants": found})
    if found["tiles"]["beyond_bytes"] > options.limit * GB:
        print(f"\nlogprobs_memory: over the limit of {options.limit} GB")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

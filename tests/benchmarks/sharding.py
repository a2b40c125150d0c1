"""Bytes that each rank holds and exchanges in every native sharding strategy, and the seconds of a step.

    torchrun --nproc-per-node 2 tests/benchmarks/sharding.py [--model FOLDER] [--tokens 512] [--ways none,gradients]
        [--out F.json]

Each rank has a copy of the model per way (`--ways` takes some alone, where memory is short), and trains packed rows
without an engine. The ways take their steps in turns; the first of each isn't counted, times are medians of rank 0's.
Bytes are counted on tensors, so they are the same on every machine: the optimizer's state, and the most gradients alive
at once in a backward. Rank 0 prints a Markdown table.
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

process.prepare_threads()  # OpenMP reads how to wait when torch is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import ROOT, versions  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from colograd.extensions.fsdp.strategy import FullySharded  # noqa: E402
from colograd.memory.token_budget import dummy_row  # noqa: E402
from colograd.parallel.ranks import gather, rank, world_size  # noqa: E402
from colograd.policy import attention  # noqa: E402
from colograd.policy.logprobs import policy_logprobs  # noqa: E402
from colograd.policy.packing import collate  # noqa: E402
from colograd.sharding.zero import STRATEGIES  # noqa: E402
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SHAPE = (64, 64, 4)  # tokens of a prompt and of a completion, and completions per group
# bytes per parameter on N ranks without buckets: gradients, optimizer state
EXPECTED = {"none": (4.0, 10.0, 1, 1), "optimizer": (4.0, 10.0, 1, None), "gradients": (4.0, 10.0, None, None)}


class Contestant:
    """A policy that is trained in one way, with its measurements."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self.model.set_attn_implementation(attention.NAME)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        accumulate_in_float32(self.model.parameters())
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.way = ({**STRATEGIES, "fsdp": FullySharded})[name if world_size() > 1 else "none"](self.model)
        self.optimizer = AdamWSplit(self.parameters, lr=1e-6)
        self.way.share(self.optimizer)
        self.steps: list[dict[str, float]] = []
        self._peak = 0
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._look())

    def _look(self) -> None:
        """Add up the gradients, those in flight to other ranks, and this rank's part of the sums."""
        alive = [p.grad for p in self.parameters if p.grad is not None]
        alive += [bucket.sum for bucket in getattr(self.way, "buckets", ()) if bucket.sum is not None]
        alive += [tensor for one in getattr(self.way, "_under_way", ()) for tensor in one[1:3]]
        self._peak = max(self._peak, sum(tensor.nbytes for tensor in alive))

    def step(self, rows: Sequence[Any]) -> None:
        started, processor = time.perf_counter(), time.process_time()
        for row in rows:
            self.way.backward(policy_logprobs(self.model, row, 1.0)[0].sum() / 1e4)
        backward = time.perf_counter()
        self.way.sum_gradients()
        self.way.clip(1.0)
        self.optimizer.step()
        self.model.zero_grad()
        ended = time.perf_counter()
        seen = {"backward_s": backward - started, "rest_s": ended - backward, "step_s": ended - started}
        self.steps.append(seen | {"processor_s": time.process_time() - processor} | self.way.traffic.take())

    def figures(self) -> dict[str, Any]:
        """Return bytes per parameter of the rank with the most, and medians of this rank's steps after the first."""
        count = sum(p.numel() for p in self.parameters)
        state = [v.nbytes for values in self.optimizer.state.values() for v in values.values() if v.dim()]
        held = {
            "weights": sum(p.nbytes for p in self.model.parameters()),
            "gradients": self._peak,
            "state": sum(state),
        }
        worst = {name: max(gather(size)) / count for name, size in held.items()}
        medians = {key: statistics.median(step[key] for step in self.steps[1:]) for key in self.steps[0]}
        return (
            {"way": self.name, "parameters": count, "largest": max(p.numel() for p in self.parameters)}
            | worst
            | medians
        )


def expected(figures: dict[str, Any]) -> tuple[float, float]:
    """Return the expected bytes per parameter of gradients and state, without buckets."""
    gradients, state, of_gradients, of_state = EXPECTED[figures["way"]]
    return gradients / (of_gradients or world_size()), state / (of_state or world_size())


def report(found: Sequence[dict[str, Any]], tokens: int, rows: int) -> str:
    lines = []
    for figures in found:
        gradients, state = expected(figures)
        lines.append(
            [
                figures["way"],
                f"{figures['weights']:.2f}",
                f"{figures['gradients']:.2f} ({gradients:.2f})",
                f"{figures['state']:.2f} ({state:.2f})",
                *(f"{figures[f'sync/{kind}_bytes'] / figures['parameters']:.2f}" for kind in ("reduced", "gathered")),
                *(f"{figures[key]:.2f}" for key in ("backward_s", "rest_s", "step_s", "processor_s")),
            ]
        )
    head = ["way", "weights", "gradients (arithmetic)", "state (arithmetic)", "reduced", "gathered"]
    head += ["backward s", "exchange and optimizer s", "step s", "processor s"]
    share = 4 * found[0]["largest"] / found[0]["parameters"]
    return (
        f"{world_size()} ranks on {machine()}, {found[0]['parameters'] / 1e6:,.0f} M parameters, {rows} rows of "
        f"{tokens} tokens per rank and step. Bytes per parameter and rank; the largest parameter's gradient, which is "
        f"a bucket of its own, is {share:.2f} of them.\n\n{table(head, lines)}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sharding.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="folder or Hub id; default: SmolLM2")
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch (512)")
    parser.add_argument("--rows", type=int, default=2, help="micro-batches per rank and step (2)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each with the warm-up (4)")
    parser.add_argument("--ways", default=",".join(EXPECTED), help=f"of {', '.join(EXPECTED)} (all)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    options.ways = options.ways.split(",")
    if unknown := set(options.ways) - EXPECTED.keys():
        parser.error(f"--ways has {', '.join(unknown)}; there are {', '.join(EXPECTED)}")
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}, but the first only warms up: at least 2")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.prepare_ranks()
    dist.init_process_group("gloo")
    contestants = [Contestant(name, options.model) for name in options.ways]
    rows = [collate(dummy_row(options.tokens, SHAPE, torch.device("cpu")))] * options.rows
    for _ in range(options.steps):
        for contestant in contestants:
            contestant.step(rows)
    found = [contestant.figures() for contestant in contestants]
    if rank() == 0:
        print(report(found, options.tokens, options.rows), flush=True)
        write(options.out, {"ranks": world_size(), "versions": versions(), "ways": found})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

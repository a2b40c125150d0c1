"""A packed row's forward and backward, eager and with torch_compile, in turns, and the seconds of compiling.

    python tests/benchmarks/layers.py [--model M] [--dtypes float32 bfloat16] [--rows 6] [--out F.json]

Each row is one group with made-up tokens, of another length each time. Medians over the rows without the first row; the
first row's seconds beyond the median are the compile time. Set TORCHINDUCTOR_CACHE_DIR to an empty folder to measure
compiling with a cold cache. Exit status 1 if the losses differ, or if a later row compiles something.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import versions  # noqa: E402

from colograd.batch import FinishReason, Group, MicroBatch, Rollout, ScoredGroup  # noqa: E402
from colograd.policy.layers import compile_layers, forget_compiled  # noqa: E402
from colograd.policy.logprobs import policy_logprobs  # noqa: E402
from colograd.policy.packing import pack  # noqa: E402
from colograd.policy.row_proof import choose_rows  # noqa: E402
from colograd.training.adamw_split import accumulate_in_float32  # noqa: E402

ALLOWED = {"float32": 1e-4, "bfloat16": 0.05}  # difference of mean log-probabilities, nats


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="layers.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder or Hub id")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(ALLOWED), default=["float32", "bfloat16"])
    parser.add_argument("--prompt-tokens", type=int, default=120)
    parser.add_argument("--completion-tokens", type=int, default=64, help="at most (64)")
    parser.add_argument("--num-generations", type=int, default=8, help="completions of a row (8)")
    parser.add_argument("--rows", type=int, default=6, help="with the one that warms up (6)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    if options.rows < 2:
        parser.error(f"--rows is {options.rows}, but the first only warms up: at least 2")
    return options


def make_row(options: argparse.Namespace, seed: int, vocabulary: int, device: torch.device) -> MicroBatch:
    draw, most = random.Random(seed), options.completion_tokens
    prompt = tuple(draw.randrange(vocabulary) for _ in range(options.prompt_tokens))
    rollouts = tuple(
        Rollout(prompt, [draw.randrange(vocabulary) for _ in range(n)], torch.zeros(n), torch.ones(n).bool(),
                FinishReason.STOP, 0)
        for n in (draw.randint(-(-most // 8), most) for _ in range(options.num_generations))
    )  # fmt: skip
    group = ScoredGroup(Group({}, rollouts, 0), torch.zeros(len(rollouts), 1), torch.ones(len(rollouts)))
    (row,) = pack([group], 10**9, False, device)
    return row


def train(model: Any, row: MicroBatch) -> tuple[float, float, float]:
    """Return wall and processor seconds of a forward and backward, and the mean log-probability."""
    model.zero_grad()
    if row.input_ids.is_cuda:
        torch.cuda.synchronize()
    started, processor = time.perf_counter(), time.process_time()
    mean = policy_logprobs(model, row, 1.0)[0].mean()
    mean.backward()
    value = mean.item()
    if row.input_ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - processor, value


def compare(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).to(device).train()
    accumulate_in_float32(model.parameters())
    if why := choose_rows(model):
        raise SystemExit(f"layers: {why}, so that its rows are padded: name another --model")
    found: dict[str, list[tuple[float, float, float]]] = {"as it is": [], "torch_compile": []}
    graphs, tokens = [], []
    for seed in range(options.rows):
        row = make_row(options, seed, model.config.vocab_size, device)
        tokens.append(row.input_ids.shape[1])
        found["as it is"].append(train(model, row))
        model.zero_grad()
        compile_layers(model)
        found["torch_compile"].append(train(model, row))
        forget_compiled(model)
        graphs.append(counters["stats"]["unique_graphs"])
    medians = {
        name: {"s": statistics.median(s for s, _, _ in trained[1:]), "first_s": trained[0][0],
               "processor_s": statistics.median(s for _, s, _ in trained[1:])}
        for name, trained in found.items()
    }  # fmt: skip
    apart = max(abs(a[2] - b[2]) for a, b in zip(*found.values(), strict=True))
    torch._dynamo.reset()
    counters.clear()
    return {"dtype": dtype, "device": device.type, "tokens": tokens, "graphs": graphs, "apart": apart, **medians}


def report(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        [f"{found['dtype']}, {name}", f"{found[name]['s']:.3f}", f"{found[name]['processor_s']:.3f}",
         f"{max(found[name]['first_s'] - found[name]['s'], 0.0):.1f}"]
        for found in results for name in ("as it is", "torch_compile")
    ]  # fmt: skip
    return table(["A row's forward and backward", "s", "processor s", "s more for the first row"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    results = [compare(options, dtype) for dtype in options.dtypes]
    lengths = [length for found in results[:1] for length in found["tokens"]]
    print(f"{Path(options.model).name}, {machine()}: rows of {min(lengths)} to {max(lengths)} tokens\n")
    print(report(results))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    write(options.out, {"settings": settings, "machine": machine(), "versions": versions(), "results": results})
    faults = [f"{found['dtype']}: {found['apart']:.2g} nats apart" for found in results
              if not found["apart"] <= ALLOWED[found["dtype"]]]  # fmt: skip
    faults += [f"{found['dtype']}: graphs {found['graphs']}" for found in results if len(set(found["graphs"])) > 1]
    for fault in faults:
        print(f"layers: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""The tail of sampling: steps with `overlap: auto` and without, simulated for many ranks, and measured on two.

    python tests/benchmarks/tail.py [--ranks 1 2 8 64] [--groups 16] [--completions 8] [--sequences 64]
                                    [--median 1000] [--longest 8192] [--spread 0.8] [--within 0.4]
                                    [--engine-step 0.02] [--sequence 0.0002] [--token 0.00005]
    python tests/benchmarks/tail.py --pairs 5 [--balanced] [--out F.json]

The first form is a simulation of events. Lengths are lognormal: a prompt's median varies by `--spread` (of the
logarithm), its completions around it by `--within`. An engine's step takes `--engine-step` seconds and `--sequence`
more for each sequence that runs; a token is trained in `--token` seconds. Groups are trained as the trainer does: own
ones, finished ones of others, and what is left is balanced. The rates are given, not measured.

The second form trains two ranks of one thread each on a random model, in turns with overlap and without; the second
rank's completions are four times as long, or with `--balanced` as long. It prints the seconds of a step, the processor
seconds of both ranks, and what the simulation says with the rates of the runs without overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colograd.parallel.balance import plan

ROOT = Path(__file__).resolve().parents[2]
PROMPT = 100  # tokens of a simulated prompt
SHORT, LONG = 32, 128  # tokens of a measured completion
MEASURED = {"groups": 8, "completions": 4, "sequences": 8, "steps": 3}  # of each rank; the first step isn't counted


@dataclass(frozen=True)
class Rates:
    """Seconds."""

    engine_step: float
    sequence: float  # more for each sequence that an engine's step decodes
    token: float  # of training


Lengths = Sequence[Sequence[int]]  # of each group's completions, on one rank


def decode(groups: Lengths, sequences: int, rates: Rates) -> list[float]:
    """When each group of a rank is finished, if its engine decodes so many sequences at once, in their order."""
    queue = [(index, length) for index, lengths in enumerate(groups) for length in lengths]
    queue.reverse()
    running: list[tuple[int, int]] = []  # (engine step at which it ends, group)
    ended, steps, now = [0.0] * len(groups), 0, 0.0
    while queue or running:
        while queue and len(running) < sequences:
            index, length = queue.pop()
            heapq.heappush(running, (steps + length, index))
        until, _ = running[0]
        now += (until - steps) * (rates.engine_step + rates.sequence * len(running))
        steps = until
        while running and running[0][0] == until:
            ended[heapq.heappop(running)[1]] = now
    return ended


@dataclass(frozen=True)
class Step:
    """A simulated step."""

    seconds: float
    idle: float  # share of the ranks' time that they neither sampled nor trained


def simulate(ranks: Sequence[Lengths], sequences: int, budget: int, rates: Rates, overlap: bool) -> Step:
    """A step of all ranks, each with its groups.

    Args:
        budget: tokens of a micro-batch.
    """
    finished = [decode(groups, sequences, rates) for groups in ranks]
    costs = [[PROMPT + sum(lengths) for lengths in groups] for groups in ranks]
    sampled = [max(of_rank) for of_rank in finished]
    left = [set(range(len(groups))) for groups in ranks]
    free = sampled[:]  # when each rank has nothing to do
    all_sampled, busy = max(sampled), sum(sampled)
    events = [(at, rank) for rank, at in enumerate(sampled)] if overlap else []
    heapq.heapify(events)
    while events:
        now, rank = heapq.heappop(events)
        if now >= all_sampled:
            continue
        tokens = 0
        others = sorted((other for other in range(len(ranks)) if other != rank), key=lambda other: -len(left[other]))
        for owner in (rank, *others):
            ready = [index for index in left[owner] if finished[owner][index] <= now]
            for index in sorted(ready, key=lambda index: -costs[owner][index]):
                if not tokens or tokens + costs[owner][index] <= budget:
                    tokens += costs[owner][index]
                    left[owner].discard(index)
            if tokens and (owner == rank or tokens >= budget):
                break
        if tokens:
            busy += tokens * rates.token
            free[rank] = now + tokens * rates.token
            heapq.heappush(events, (free[rank], rank))
            continue
        coming = [finished[owner][index] for owner in range(len(ranks)) for index in left[owner]]
        heapq.heappush(events, (min((at for at in coming if at > now), default=all_sampled), rank))
    rest = [[costs[rank][index] for index in sorted(left[rank])] for rank in range(len(ranks))]
    loads = [sum(rest[owner][index] for owner, index in row) * rates.token for row in plan(rest)]
    seconds = max(all_sampled, *free) + max(loads)
    return Step(seconds, 1 - (busy + sum(loads)) / (seconds * len(ranks)))


def draw(options: argparse.Namespace, ranks: int, seed: int) -> list[Lengths]:
    """Lengths of a step's completions."""
    source = random.Random(seed)

    def group() -> list[int]:
        median = options.median * source.lognormvariate(0.0, options.spread)
        drawn = (median * source.lognormvariate(0.0, options.within) for _ in range(options.completions))
        return [max(1, min(options.longest, int(length))) for length in drawn]

    return [[group() for _ in range(options.groups)] for _ in range(ranks)]


def print_simulation(options: argparse.Namespace) -> None:
    rates = Rates(options.engine_step, options.sequence, options.token)
    print("| ranks | step, s | with overlap, s | faster | idle | with overlap |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for ranks in options.ranks:
        found: dict[bool, list[Step]] = {False: [], True: []}
        for seed, overlap in itertools.product(range(options.steps), found):
            lengths = draw(options, ranks, seed)
            found[overlap].append(simulate(lengths, options.sequences, options.budget, rates, overlap))
        off, on = (statistics.mean(step.seconds for step in found[overlap]) for overlap in found)
        idle, less = (statistics.mean(step.idle for step in found[overlap]) for overlap in found)
        print(f"| {ranks} | {off:.1f} | {on:.1f} | {off / on:.2f} x | {idle:.0%} | {less:.0%} |")


# -- two ranks


def be_rank(given: dict[str, Any]) -> None:
    """Train a few steps; print each one's figures on rank 0."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import tiny

    from colograd import GRPOTrainer
    from colograd.parallel.ranks import gather

    longest = LONG if given["rank"] or given["balanced"] else SHORT

    class Skewed:
        """The engine, with completions of a length of this rank's."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def generate(self, prompts: Any, sampling: Any, **kwargs: Any) -> Any:
            return self.engine.generate(prompts, dataclasses.replace(sampling, max_tokens=longest), **kwargs)

    processor: list[float] = []

    class Timed(GRPOTrainer):
        def report_step(self, metrics: Any) -> None:
            super().report_step(metrics)
            processor.append(time.process_time())

    args = tiny.config(
        given["folder"],
        overlap=given["overlap"],
        prompts_per_step=2 * MEASURED["groups"],
        num_generations=MEASURED["completions"],
        max_completion_length=LONG,
        max_tokens_per_microbatch=1024,
        max_steps=MEASURED["steps"],
        report=False,
        vllm_engine_kwargs={"enforce_eager": True, "max_num_seqs": MEASURED["sequences"]},
    )
    trainer = Timed(given["model"], tiny.vowels, args, tiny.prompts(64), rollout_func=Skewed)
    trainer.train()
    steps = [
        {
            name: entry.get(name, 0.0)
            for name in ("step_time", "time/generate", "time/train", "time/wait", "train/packed_tokens",
                         "train/early_tokens", "train/sampled_tokens")
        }
        for entry in trainer.state.log_history
        if "step_time" in entry
    ]  # fmt: skip
    ranks = gather((processor, steps))
    if not given["rank"]:
        used = [sum(last - first for first, last in itertools.pairwise(seconds)) for seconds, _ in ranks]
        print("RESULT " + json.dumps({"steps": [steps[1:] for _, steps in ranks], "processor": used}))


def run_ranks(model: Path, overlap: str, balanced: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given = {"model": str(model), "overlap": overlap, "balanced": balanced, "folder": folder}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            "0",
            __file__,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "--rank-of", json.dumps(given)], capture_output=True, text=True, env=environment
        )
    if done.returncode:
        raise SystemExit(f"the ranks failed: {done.stderr[-3000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def predicted(off: Sequence[dict[str, Any]], balanced: bool) -> tuple[float, float]:
    """Seconds of a step without overlap and with it, by rates of the runs without."""
    sampling = [
        statistics.median(step["time/generate"] for run in off for step in run["steps"][rank]) for rank in range(2)
    ]
    waves = MEASURED["groups"] * MEASURED["completions"] / MEASURED["sequences"]
    engine_step = sampling[1] / (waves * LONG)
    seconds = sum(step["time/train"] for run in off for of_rank in run["steps"] for step in of_rank)
    # Every rank logs the tokens of all.
    tokens = sum(step["train/packed_tokens"] for run in off for step in run["steps"][0])
    rates = Rates(engine_step, 0.0, seconds / tokens)
    first = LONG if balanced else SHORT
    groups = [[[length] * MEASURED["completions"]] * MEASURED["groups"] for length in (first, LONG)]
    found = (simulate(groups, MEASURED["sequences"], 1024, rates, overlap).seconds for overlap in (False, True))
    return next(found), next(found)


def measure(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import tiny

    found: dict[str, list[dict[str, Any]]] = {"off": [], "auto": []}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make_model(Path(folder) / "model", context=1024, layers=options.layers)
        for pair in range(options.pairs):
            for overlap in found if pair % 2 else reversed(found):
                found[overlap].append(run_ranks(model, overlap, options.balanced))
                print(f"pair {pair + 1}, {overlap}: {_median(found[overlap][-1:]):.2f} s a step", file=sys.stderr)
    print("| | step, s | processor seconds of both ranks | trained early |")
    print("| --- | ---: | ---: | ---: |")
    for overlap, runs in found.items():
        steps = [step for run in runs for step in run["steps"][0]]
        early = sum(step["train/early_tokens"] for step in steps) / sum(step["train/packed_tokens"] for step in steps)
        used = statistics.median(sum(run["processor"]) for run in runs)
        print(f"| overlap: {overlap} | {_median(runs):.2f} | {used:.1f} | {early:.0%} |")
    ratios = [_median([off]) / _median([on]) for off, on in zip(found["off"], found["auto"], strict=True)]
    off, on = predicted(found["off"], options.balanced)
    print(
        f"\nfaster: {', '.join(f'{ratio:.2f}' for ratio in ratios)} x; simulated: {off:.2f} s and {on:.2f} s, ", end=""
    )
    print(f"{off / on:.2f} x")
    if options.out:
        options.out.write_text(json.dumps(found))


def _median(runs: Sequence[dict[str, Any]]) -> float:
    return statistics.median(step["step_time"] for run in runs for step in run["steps"][0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="tail.py", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 64])
    parser.add_argument("--groups", type=int, default=16, help="of a rank and step")
    parser.add_argument("--completions", type=int, default=8, help="of a group")
    parser.add_argument("--sequences", type=int, default=64, help="that an engine decodes at once")
    parser.add_argument("--median", type=float, default=1000.0, help="tokens of a completion")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a completion")
    parser.add_argument("--spread", type=float, default=0.8, help="of the logarithms of prompts' medians")
    parser.add_argument("--within", type=float, default=0.4, help="of the logarithms of a prompt's completions")
    parser.add_argument("--engine-step", type=float, default=0.02, help="seconds")
    parser.add_argument("--sequence", type=float, default=0.0002, help="seconds more per running sequence")
    parser.add_argument("--token", type=float, default=0.00005, help="seconds of training")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="simulated steps")
    parser.add_argument("--pairs", type=int, default=0, help="measure two ranks so often")
    parser.add_argument("--layers", type=int, default=8, help="of the measured model")
    parser.add_argument("--balanced", action="store_true", help="measure equal lengths")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_rank(options.rank_of | {"rank": int(os.environ["RANK"])})
    elif options.pairs:
        measure(options)
    else:
        print_simulation(options)


if __name__ == "__main__":
    main()

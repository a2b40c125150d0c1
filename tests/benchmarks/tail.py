"""The tail of sampling: steps without it, simulated for many ranks, and measured on two.

    python tests/benchmarks/tail.py [--ranks 1 2 8 64] [--groups 16] [--completions 8] [--sequences 64]
                                    [--median 1000] [--longest 8192] [--spread 0.8] [--within 0.4] [--run FOLDER]
                                    [--engine-step 0.02] [--sequence 0.0002] [--token 0.00005]
                                    [--share 0.8]
    python tests/benchmarks/tail.py --pairs 5 [--balanced] [--turns 10] [--sharding optimizer] [--model M]
                                    [--device cuda] [--out F.json]

The first form is a simulation of events (`tail_simulation.py`): a step as it is, with `overlap` and with `carry_over:
SHARE`. Lengths are lognormal: a prompt's median varies by `--spread` (of the logarithm), its completions around it by
`--within`; `--run FOLDER` takes the lengths of a run that kept its rollout log. An engine's step takes `--engine-step`
seconds and `--sequence` more for each sequence that runs. A token is trained in `--token` seconds. The rates are given,
not measured.

The second form trains two ranks of one thread each, a step with overlap and a step without in turns; the second rank's
completions are four times as long, or with `--balanced` as long. It prints the seconds of a step, the processor seconds
of both ranks, the simulation's result with the rates of the steps without overlap, and where each rank spent its time;
and how many matrix products two processors compute at once, relative to one processor. Where that is far below 2, they
are threads of one core: a rank that trains slows one that decodes, which a GPU of its own would not. With `--turns MS`
a rank runs while the other is stopped, for so many milliseconds each: two processors of half the speed that share
nothing but caches. An exchange between ranks takes a turn or two then.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tail_simulation import Lengths, LogNormal, Rates, Recorded, simulate, table

from colograd.runtime import process

ROOT = Path(__file__).resolve().parents[2]


# -- two ranks


@dataclass(frozen=True)
class Sizes:
    groups: int = 18
    completions: int = 4  # of a group
    sequences: int = 8  # sequences that an engine decodes at once
    short: int = 24  # tokens of the first rank's completions
    long: int = 96  # ... and of the second's
    budget: int = 512  # tokens of a micro-batch

    def lengths(self, first: int) -> list[Lengths]:
        return [[[length] * self.completions] * self.groups for length in (first, self.long)]


def be_rank(options: argparse.Namespace) -> None:
    """Train with overlap and without it, in turns, on the same engines and weights. Rank 0 writes the figures."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import tiny

    from colograd import GRPOTrainer
    from colograd.parallel.ranks import gather

    sizes, rank = options.sizes, int(os.environ["RANK"])
    longest = sizes.long if rank or options.balanced else sizes.short
    steps: list[dict[str, float]] = []

    class OfLength:
        """The engine, with completions of this rank's fixed length."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def generate(self, prompts: Any, sampling: Any, **kwargs: Any) -> Any:
            return self.engine.generate(prompts, dataclasses.replace(sampling, max_tokens=longest), **kwargs)

    class InTurns(GRPOTrainer):
        def begin_records(self, evaluation: str = "") -> None:
            super().begin_records(evaluation)
            self.processor = time.process_time()
            self.round.finished = shared if overlaps(self.state.global_step) else None

        def report_step(self, metrics: Any) -> None:
            super().report_step(metrics)
            steps.append({**metrics, "processor": time.process_time() - self.processor})

    args = tiny.config(
        options.folder,
        overlap="auto",
        prompts_per_step=2 * sizes.groups,
        num_generations=sizes.completions,
        max_completion_length=sizes.long,
        max_tokens_per_microbatch=sizes.budget,
        sharding=options.sharding,
        max_steps=2 + 2 * options.pairs,
        learning_rate=1e-6,
        beta=0.04,
        report=False,
        generation_kwargs={"ignore_eos": True},
        vllm_engine_kwargs={"enforce_eager": True, "max_num_seqs": sizes.sequences},
        **({} if options.device == "cpu" else {"model_init_kwargs": {}, "bf16": True}),
    )
    trainer = InTurns(options.model, tiny.vowels, args, tiny.prompts(64), rollout_func=OfLength)
    shared = trainer.round.finished
    (note := Path(options.folder, f"{rank}.pid")).write_text(str(os.getpid()))
    trainer.train()
    ranks, at_once = gather(steps), gather(products_at_once(rank))
    if not rank:
        (Path(options.folder) / "steps.json").write_text(json.dumps({"steps": ranks, "at_once": at_once[0]}))
    note.unlink()
    trainer.close()


def products_at_once(rank: int, seconds: float = 1.0) -> float:
    """Return the matrix products that two ranks compute at once, relative to one rank alone."""
    import torch

    from colograd.parallel.ranks import gather

    left, right = torch.randn(512, 256), torch.randn(256, 256)

    def products() -> int:
        ends, number = time.monotonic() + seconds, 0
        while time.monotonic() < ends:
            left @ right
            number += 1
        return number

    if rank:
        time.sleep(seconds)
    alone = gather(0 if rank else products())[0]
    return sum(gather(products())) / alone


def overlaps(step: int) -> bool:
    """Return whether a step is trained with overlap: the first or the second of each pair, in turns."""
    return step % 4 in (0, 3)


def take_turns(ranks: subprocess.Popen[bytes], folder: Path, seconds: float) -> None:
    """Let the two ranks run in turns, until one rank is done."""
    notes = [folder / f"{rank}.pid" for rank in range(2)]

    def present() -> list[int]:
        return [int(note.read_text() or 0) for note in notes if note.exists()]

    while ranks.poll() is None and not all(pids := present() if len(present()) == 2 else [0]):
        time.sleep(0.1)
    pids, runs = present(), 0
    try:
        while ranks.poll() is None and all(note.exists() for note in notes):
            os.kill(pids[1 - runs], signal.SIGSTOP)
            os.kill(pids[runs], signal.SIGCONT)
            time.sleep(seconds)
            runs = 1 - runs
    except ProcessLookupError:
        pass  # the rank failed, and its launcher reports why
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def run_ranks(model: str, options: argparse.Namespace) -> tuple[list[dict[bool, list[dict[str, float]]]], float]:
    """Return each pair of steps ({overlapped: figures of each rank}) but the first, and `products_at_once`."""
    with tempfile.TemporaryDirectory() as folder:
        port = str(process.free_port())
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, __file__]
        given = ["--rank-in", folder, "--model", model, "--pairs", str(options.pairs), "--device", options.device]
        given += ["--sharding", options.sharding, "--measured", *map(str, dataclasses.astuple(options.sizes))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *launch, *given, *(["--balanced"] if options.balanced else [])]
        output = Path(folder) / "output"
        with output.open("wb") as to:
            ranks = subprocess.Popen(command, stdout=to, stderr=subprocess.STDOUT, env=environment)
            try:
                if options.turns:
                    take_turns(ranks, Path(folder), options.turns / 1000)
                ranks.wait()
            finally:
                ranks.terminate()
        if ranks.returncode:
            raise SystemExit(f"the ranks failed: {output.read_text(errors='replace')[-4000:]}")
        found = json.loads((Path(folder) / "steps.json").read_text())
    of_steps = [list(of_step) for of_step in zip(*found["steps"], strict=True)]
    pairs = [
        {overlaps(step): of_steps[step] for step in (first, first + 1)} for first in range(2, 2 * options.pairs + 2, 2)
    ]
    return pairs, found["at_once"]


def trained(of_rank: dict[str, float]) -> float:
    """Return seconds of a rank's training, including the reference's forward."""
    return of_rank["time/train"] + of_rank["time/ref_logprobs"]


def predicted(off: Sequence[Sequence[dict[str, float]]], first: int, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds of a step without overlap and with it, by the rates of the steps without.

    Args:
        off: these steps' figures, of each rank.
        first: tokens of the first rank's completions.
    """
    lengths = sizes.lengths(first)
    completed = sum(sum(map(sum, groups)) for groups in lengths)
    packed = statistics.median(step[0]["train/packed_tokens"] for step in off)  # sum over all ranks
    prompt = max(0, round((packed - completed) / (2 * sizes.groups)))
    waves = math.ceil(sizes.groups * sizes.completions / sizes.sequences)
    engine_step = statistics.median(step[1]["time/generate"] for step in off) / (waves * sizes.long)
    token = statistics.median(sum(map(trained, step)) / packed for step in off)
    # exchanges, the optimizer and packing
    besides = statistics.median(
        step[0]["step_time"] - max(of_rank["time/generate"] for of_rank in step) - max(map(trained, step))
        for step in off
    )
    rates = Rates(engine_step, 0.0, token)
    without, overlapped = (
        besides + simulate(lengths, sizes.sequences, sizes.budget, rates, overlap, prompt).seconds
        for overlap in (False, True)
    )
    return without, overlapped


def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pairs, at_once = run_ranks(options.model or make_model(Path(folder) / "model"), options)
    sizes = options.sizes
    told = predicted([pair[False] for pair in pairs], sizes.long if options.balanced else sizes.short, sizes)
    print(f"two processors at once multiply {at_once:.2f} x what one does alone\n")
    print("| overlap | step, s | simulated, s | processor seconds of both ranks | trained early | idle |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    found: dict[str, Any] = {"pairs": pairs, "predicted": told, "at_once": at_once}
    for name, overlap, simulated in (("off", False, told[0]), ("auto", True, told[1])):
        steps = [pair[overlap] for pair in pairs]
        seconds = statistics.median(step[0]["step_time"] for step in steps)
        used = statistics.median(sum(of_rank["processor"] for of_rank in step) for step in steps)
        early = statistics.mean(
            step[0].get("train/early_tokens", 0.0) / step[0]["train/packed_tokens"] for step in steps
        )
        idle = statistics.mean(step[0]["rollout/idle_share"] for step in steps)
        print(f"| {name} | {seconds:.2f} | {simulated:.2f} | {used:.1f} | {early:.0%} | {idle:.0%} |")
        found[name] = {"step": seconds, "early": early, "idle": idle}
    ratios = [pair[False][0]["step_time"] / pair[True][0]["step_time"] for pair in pairs]
    found["ratio"] = statistics.median(ratios)
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"\nfaster: {found['ratio']:.2f} x (the pairs: {shown}); simulated {told[0] / told[1]:.2f} x")
    for name, overlap in (("off", False), ("auto", True)):
        for rank in range(2):
            phases = {
                phase: statistics.median(pair[overlap][rank].get(f"time/{phase}", 0.0) for pair in pairs)
                for phase in ("generate", "wait", "ref_logprobs", "train", "sync", "optimizer")
            }
            print(f"{name}, rank {rank}: " + ", ".join(f"{phase} {took:.2f} s" for phase, took in phases.items()))
    if options.out:
        options.out.write_text(json.dumps(found))


def make_model(folder: Path) -> str:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import tiny

    return str(tiny.make_model(folder, context=1024, layers=4, heads=12, keys=12, width=384))


def print_simulation(options: argparse.Namespace) -> None:
    rates = Rates(options.engine_step, options.sequence, options.token)
    lengths = LogNormal(options.median, options.spread, options.within, options.longest, options.completions)
    source = Recorded.of(options.run) if options.run else lengths
    sizes = options.ranks, options.groups, options.sequences, options.budget
    for line in table(source, *sizes, rates, options.share, options.steps):
        print(line)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--run", type=Path, help="whose recorded lengths are simulated")
    parser.add_argument("--share", type=float, default=0.8, help="carry_over")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="simulated steps")
    parser.add_argument("--pairs", type=int, default=0, help="measure two ranks so often")
    parser.add_argument("--balanced", action="store_true", help="measure equal lengths")
    parser.add_argument("--turns", type=float, default=0.0, help="milliseconds in which one rank runs at a time")
    parser.add_argument("--sharding", default="none", help="of the measured runs")
    parser.add_argument("--model", help="a folder; none: a small random one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--measured",
        type=int,
        nargs=6,
        default=dataclasses.astuple(Sizes()),
        metavar=tuple(field.name.upper() for field in dataclasses.fields(Sizes)),
        help="the sizes of a measured step, on each rank",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-in", dest="folder", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.sizes = Sizes(*options.measured)
    return options


def main() -> None:
    options = parse()
    if options.folder:
        be_rank(options)
    elif options.pairs:
        measure(options)
    else:
        print_simulation(options)


if __name__ == "__main__":
    main()

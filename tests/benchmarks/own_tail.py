"""One rank's tail: steps that train finished groups between the steps of the engine (`overlap: auto`) and steps that
don't, in turns on the same engine and weights.

    python tests/benchmarks/own_tail.py --model M [--device cuda] [--pairs 3] [--out F.json]
    python tests/benchmarks/own_tail.py --simulated

The last prompt's completions are `--long` tokens long, all others `--short`. It prints the seconds of a step, of its
decoding and its training, and the share of tokens that was trained early. On a CPU nothing is trained between steps: it
is switched on here all the same, to see that the benchmark works, and what it takes there is no figure.

The second form simulates one rank with the lengths and rates of `tail.py`, as if decoding and training took nothing
from each other: the most that there is to gain.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tail import parse as parse_tail
from tail_simulation import PROMPT, Lengths, LogNormal, Rates, decode

from colograd.extensions.overlap.beside_decoding import ENOUGH, TAIL

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("step_time", "time/generate", "time/train", "time/ref_logprobs")


def overlaps(step: int) -> bool:
    """Whether a step is trained with overlap: one of each pair, the first or the second in turns."""
    return step % 4 in (0, 3)


def simulate(groups: Lengths, sequences: int, budget: int, rates: Rates) -> tuple[float, float, float]:
    """Seconds of a step without overlap and with it, and the share of its tokens that is trained early."""
    ends = iter(decode([[length] for group in groups for length in group], sequences, rates).ended)
    of_groups = [[next(ends) for _ in group] for group in groups]
    ended = sorted(end for group in of_groups for end in group)
    left = [(max(of_group), PROMPT + sum(group)) for of_group, group in zip(of_groups, groups, strict=True)]
    total, sampled = sum(tokens for _, tokens in left), ended[-1]
    now = ended[-(min(sequences, len(ended)) // TAIL) - 1]  # the tail begins
    while now < sampled:
        ready = sorted((group for group in left if group[0] <= now), key=lambda group: -group[1])
        if sum(tokens for _, tokens in ready) < min(budget, ENOUGH):
            now = min((end for end, _ in left if end > now), default=sampled)
            continue
        row: list[tuple[float, int]] = []
        for group in ready:
            if not row or sum(tokens for _, tokens in (*row, group)) <= budget:
                row.append(group)
                left.remove(group)
        now += sum(tokens for _, tokens in row) * rates.token
    rest = sum(tokens for _, tokens in left)
    return sampled + total * rates.token, max(sampled, now) + rest * rates.token, 1 - rest / total


def print_simulation(steps: int = 5) -> None:
    print("| training, tokens/s | micro-batch | step, s | with overlap, s | faster | trained early |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    given = parse_tail([])
    lengths = LogNormal(given.median, given.spread, given.within, given.longest, given.completions)
    for token, budget in itertools.product((0.00005, 0.0003), (16384, 65536)):
        rates = Rates(given.engine_step, given.sequence, token)
        sources = map(random.Random, range(steps))
        drawn = [[lengths.group(source) for _ in range(given.groups)] for source in sources]
        found = [simulate(groups, given.sequences, budget, rates) for groups in drawn]
        off, on, early = (statistics.mean(column) for column in zip(*found, strict=True))
        print(f"| {1 / token:,.0f} | {budget:,} | {off:.1f} | {on:.1f} | {off / on:.2f} x | {early:.0%} |")


def train(options: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    """The figures of each step."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import tiny

    from colograd import GRPOTrainer
    from colograd.batch import Group
    from colograd.config import GRPOConfig
    from colograd.engine.sampling import request_seed

    on_cpu, steps = options.device == "cpu", list[dict[str, float]]()
    if on_cpu:
        GRPOConfig.why_not_between_steps = property(lambda self: "")

    class OneLong:
        """The engine, with the last prompt's completions longer than all others."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def generate(
            self, prompts: Sequence[Any], sampling: Any, *, version: int, seed: int, purpose: str = "train"
        ) -> Iterator[Group]:
            waiting = {}
            for prompt in prompts:
                length = options.long if prompt is prompts[-1] else options.short
                own = request_seed(seed, prompt.position, purpose)
                name = self.engine.submit(prompt.input, dataclasses.replace(sampling, max_tokens=length), own)
                waiting[name] = prompt
            try:
                while waiting:
                    for name, completions in self.engine.advance():
                        prompt = waiting.pop(name)
                        rollouts = tuple(one.rollout(prompt.input, version) for one in completions)
                        yield Group(prompt.example, rollouts, prompt.position)
            finally:
                self.engine.abort(waiting)

    class InTurns(GRPOTrainer):
        def begin_records(self, evaluation: str = "") -> None:
            super().begin_records(evaluation)
            self.round.finished = finished if overlaps(self.state.global_step) else None

        def report_step(self, metrics: Any) -> None:
            super().report_step(metrics)
            steps.append(dict(metrics))

    args = tiny.config(
        folder,
        overlap="auto",
        prompts_per_step=options.prompts,
        num_generations=options.completions,
        max_completion_length=options.long,
        max_tokens_per_microbatch=options.budget,
        max_steps=2 + 2 * options.pairs,
        learning_rate=1e-6,
        beta=0.04,
        report=False,
        generation_kwargs={"ignore_eos": True},
        **({} if on_cpu else {"model_init_kwargs": {}, "bf16": True}),
    )
    trainer = InTurns(options.model, tiny.vowels, args, tiny.prompts(64), rollout_func=OneLong)
    finished = trainer.round.finished
    trainer.train()
    trainer.close()
    return steps[2:]  # much is done once


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="own_tail.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder")
    parser.add_argument("--simulated", action="store_true", help="measure nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=3, help="of steps")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--completions", type=int, default=8, help="of a prompt")
    parser.add_argument("--short", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--long", type=int, default=1024, help="... of the last prompt's")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    options = parser.parse_args(argv)
    if not (options.model or options.simulated):
        parser.error("a --model to measure with, or --simulated")
    return options


def main() -> None:
    options = parse()
    if options.simulated:
        print_simulation()
        return
    with tempfile.TemporaryDirectory() as folder:
        steps = train(options, folder)
    places = {overlap: [p for p in range(len(steps)) if overlaps(p + 2) == overlap] for overlap in (False, True)}
    found: dict[str, Any] = {}
    print("| overlap | step, s | generate, s | train, s | reference, s | trained early |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, overlap in (("off", False), ("auto", True)):
        chosen = [steps[place] for place in places[overlap]]
        seconds = [statistics.median(step.get(phase, 0.0) for step in chosen) for phase in PHASES]
        early = statistics.mean(step.get("train/early_tokens", 0.0) / step["train/packed_tokens"] for step in chosen)
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in seconds) + f" | {early:.0%} |")
        found[name] = {"step": seconds[0], "generate": seconds[1], "train": seconds[2], "early": early}
    found["ratio"] = found["off"]["step"] / found["auto"]["step"]
    print(f"\nfaster: {found['ratio']:.2f} x")
    if options.out:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Processor seconds of a reward model: all completions at once, group by group, and padded to the longest of all.

    python tests/benchmarks/reward_models.py [--groups 6] [--num-generations 4] [--trials 3] [--out F.json]

A classifier of the model's shape with random float32 weights scores the same texts in three ways, in turns: as the
trainer does (all completions sorted by length), one group after the other (as where groups are scored while others are
sampled), and as TRL does, in one padded batch. Medians of the trials; a Markdown table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="reward_models.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="whose shape and tokenizer are taken")
    parser.add_argument("--groups", type=int, default=6, help="prompts of 20 to 60 words (6)")
    parser.add_argument("--num-generations", type=int, default=4, help="completions of each prompt (4)")
    parser.add_argument("--mean-words", type=int, default=25, help="mean length of completions, exponential (25)")
    parser.add_argument("--max-words", type=int, default=96, help="longest completion (96)")
    parser.add_argument("--trials", type=int, default=3, help="of each way (3)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def texts(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Make prompts with their completions, the same in each run."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(count))

    lengths = [
        [
            min(options.max_words, int(draw.expovariate(1 / options.mean_words)) + 1)
            for _ in range(options.num_generations)
        ]
        for _ in range(options.groups)
    ]
    return [(words(draw.randint(20, 60)), [" " + words(length) for length in of_group]) for of_group in lengths]


def ways(options: argparse.Namespace) -> dict[str, Callable[[], list[float]]]:
    """Return three ways that give the same rewards."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from colograd import GRPOConfig
    from colograd.extensions.graders.models import RewardModel

    shape = AutoConfig.from_pretrained(options.model, num_labels=1)
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(shape, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = RewardModel(classifier, tokenizer, GRPOConfig(output_dir="unused", report_to="none"))
    groups = texts(options)
    prompts = [prompt for prompt, completions in groups for _ in completions]
    answers = [completion for _, completions in groups for completion in completions]

    def at_once() -> list[float]:
        return model(prompts, answers)

    def by_group() -> list[float]:
        return [reward for prompt, completions in groups for reward in model([prompt] * len(completions), completions)]

    def padded() -> list[float]:
        joined = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        rows = tokenizer(joined, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            return model.model(**rows.to(model.device)).logits[:, 0].tolist()

    return {"at once, by length": at_once, "group by group": by_group, "one padded batch": padded}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    called = ways(options)
    expected, *_ = [torch.tensor(function()) for function in called.values()]  # warms up
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in called}
    for _ in range(options.trials):
        for name, function in called.items():
            clock, processor = time.perf_counter(), time.process_time()
            rewards = function()
            seconds[name].append((time.perf_counter() - clock, time.process_time() - processor))
            torch.testing.assert_close(torch.tensor(rewards), expected, rtol=1e-3, atol=1e-3)
    median = {
        name: tuple(statistics.median(values) for values in zip(*of, strict=True)) for name, of in seconds.items()
    }
    first = next(iter(median.values()))
    rows = [[name, f"{s:.2f}", f"{p:.2f}", f"{p / first[1]:.2f}"] for name, (s, p) in median.items()]
    print(f"{options.groups} prompts x {options.num_generations} completions, {options.model}, {machine()}\n")
    print(table(["A reward model", "s", "processor s", "of the first"], rows))
    named = dict(zip(("at_once", "by_group", "padded"), median.values(), strict=True))
    write(options.out, {f"processor_s.{name}": p for name, (_, p) in named.items()} | {"machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Colograd and TRL's colocated GRPOTrainer side by side: seconds of a step by phase, tokens, forwards, peak memory.

    python tests/benchmarks/side_by_side.py --model M --prompt-tokens 120 --completion-tokens 64 --num-generations 6
        --prompts-per-step 4 --steps 3 --dtype float32 --out F.json

Both train the same model on the same prompts with the same engine settings, threads and allocator settings, each in a
process of its own, in turns (--trials of each). Figures are medians over all steps but the first of each process. The
training phase is timed a second time on identical recorded rollouts, which takes the luck of sampling out of the
comparison. `--also` adds variants: TRL's fastest settings, and our own path without shared prompts. Prints
a Markdown table. It runs on a GPU where there is one, else on the CPU. Needs TRL 1.16.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from contestants import VARIANTS  # noqa: E402

TRAINERS = ("colograd", "trl")
FIGURES = ("step_s", "train_s", "generate_s", "publish_s", "tokens_through_model", "forwards", "peak_memory_bytes")
WORDS = ("red", "blue", "old", "new", "day", "night", "sun", "moon", "tree", "river", "stone", "house", "road", "bird")
NOTE = (
    "Both: gradient checkpointing off, policy and engine in the same dtype, the same KV cache, eager vLLM on a CPU, "
    "threads and allocator set as colograd sets them, so that the comparison is about the method. Training is every "
    "forward and backward of the policy (TRL's second forward for old log-probabilities, colograd's packing)."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="side_by_side.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder or Hub id")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="tokens of each prompt, template included (120)")
    parser.add_argument("--completion-tokens", type=int, default=64, help="tokens of a completion at most (64)")
    parser.add_argument("--num-generations", type=int, default=6, help="completions per prompt (6)")
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="counted optimizer steps per process (3)")
    parser.add_argument("--trials", type=int, default=1, help="processes of each trainer, in turns (1)")
    parser.add_argument("--repeats", type=int, default=2, help="of the training phase on recorded rollouts (2)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows-per-microbatch", type=int, help="TRL's per_device_train_batch_size; default: all")
    parser.add_argument("--signal", type=float, default=1.0, help="share of groups with a reward difference (1)")
    parser.add_argument("--ignore-eos", action="store_true", help="every completion has all its tokens")
    parser.add_argument(
        "--plain-malloc",
        action="store_true",
        help="on a CPU, leave glibc's allocator as it is: both give memory back, and spend more time on page faults",
    )
    parser.add_argument("--also", nargs="*", default=[], choices=list(VARIANTS), help="variants to compare, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    options = parser.parse_args(argv)
    completions = options.prompts_per_step * options.num_generations
    if options.rows_per_microbatch is None:
        options.rows_per_microbatch = completions
    if completions % options.rows_per_microbatch:
        parser.error(
            f"--rows-per-microbatch {options.rows_per_microbatch} doesn't divide the {completions} completions"
        )
    for name, least in (("steps", 1), ("trials", 1), ("repeats", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least {least}")
    return options


# -- the task


def make_prompts(tokenizer: Any, tokens: int, count: int, seed: int) -> list[Any]:
    """Make ``count`` different prompts of exactly ``tokens`` tokens: conversations, or plain text if the template
    leaves no room."""
    encoders: list[Callable[[str], tuple[Any, list[int]]]] = [lambda text: (text, tokenizer(text).input_ids)]
    if getattr(tokenizer, "chat_template", None):
        encoders.insert(0, lambda text: _conversation(tokenizer, text))
    generator = random.Random(seed)
    for encode in encoders:
        prompts = [_fit(encode, tokens, generator) for _ in range(count)]
        if None not in prompts:
            return prompts
    raise ValueError(f"No prompt of exactly {tokens} tokens was found: choose another number.")


def _conversation(tokenizer: Any, text: str) -> tuple[Any, list[int]]:
    messages = [{"role": "user", "content": text}]
    return messages, tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _fit(encode: Callable[[str], tuple[Any, list[int]]], tokens: int, generator: random.Random) -> Any | None:
    """Return a prompt of exactly ``tokens`` tokens, a question behind words, or None."""
    for _ in range(20):
        question = f"What is {generator.randrange(1, 10)} + {generator.randrange(1, 10)}? Give only the number."
        for ending in (question, question[8:], question[-8:], "Go."):
            words: list[str] = []
            prompt, ids = encode(ending)
            most = max(len(encode(f"{word} {ending}")[1]) - len(ids) for word in WORDS)  # tokens of a word
            while len(ids) < tokens and len(words) <= 2 * tokens:
                # Adding words one by one to a long prompt would take minutes.
                words += generator.choices(WORDS, k=max((tokens - len(ids)) // most, 1))
                prompt, ids = encode(" ".join([*words, ending]))
            if len(ids) == tokens:
                return prompt
    return None


def convert(model: str, dtype: str, folder: Path) -> Any:
    """Save the model in the compared dtype, and return its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(folder)
    gc.collect()
    return tokenizer


def kv_bytes(folder: Path, options: argparse.Namespace) -> int:
    """Return room for every sequence of a step at full length, and one more, in blocks of at most 128 tokens."""
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(folder).get_text_config()
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    per_token = 2 * model.num_hidden_layers * (model.num_key_value_heads or model.num_attention_heads) * head_dim
    length = options.prompt_tokens + options.completion_tokens + 128
    sequences = options.prompts_per_step * options.num_generations + 1
    return int(per_token * (4 if options.dtype == "float32" else 2) * length * sequences)


def make_jobs(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Return the jobs in their order. The trainers take turns."""
    tokenizer = convert(options.model, options.dtype, folder / "model")
    per_step, steps = options.prompts_per_step, options.steps + 1
    prompts = make_prompts(tokenizer, options.prompt_tokens, per_step * steps, options.seed)
    with_signal = round(options.signal * per_step)
    shared = {
        "model": str(folder / "model"),
        "rows": [{"prompt": p, "signal": i % per_step < with_signal} for i, p in enumerate(prompts)],
        "kv_bytes": kv_bytes(folder / "model", options),
        "rollouts": str(folder / "recorded"),
    }
    names = {field.name for field in dataclasses.fields(_job_class())} & vars(options).keys() - shared.keys()
    shared |= {name: getattr(options, name) for name in names}
    for trial in range(options.trials):
        for trainer in (*TRAINERS, *options.also):
            place = folder / f"{trainer}-{trial}"
            yield {**shared, "trainer": trainer, "folder": str(place), "out": f"{place}.json"}


def _job_class() -> type:
    from contestants import Job

    return Job


def run(job: dict[str, Any]) -> dict[str, Any]:
    description = Path(job["out"]).with_suffix(".job.json")
    description.write_text(json.dumps(job))
    print(f"side_by_side: {Path(job['folder']).name}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, str(HERE / "contestants.py"), str(description)], check=True, stdout=sys.stderr)
    return json.loads(Path(job["out"]).read_text())  # type: ignore[no-any-return]


# -- the figures


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the counted steps of one trainer's trials."""
    steps = [step for trial in trials for step in trial["steps"]]
    recorded = [step for trial in trials for step in trial["recorded"]]
    names = {"train_recorded_s": "train_s", "cpu_recorded_s": "cpu_s", "tokens_recorded": "tokens_through_model"}
    return {
        **{name: statistics.median(step[name] for step in steps) for name in FIGURES},
        "completion_tokens": statistics.median(step["completion_tokens"] for step in steps),
        **{to: statistics.median(step[name] for step in recorded) for to, name in names.items() if recorded},
        "steps": steps,
        "recorded": recorded,
    }


def ratios(trainers: dict[str, dict[str, Any]], other: str = "trl") -> dict[str, float]:
    """Return another contestant's figures over colograd's. Above 1 colograd is better."""
    names = {
        "step": "step_s",
        "train": "train_s",
        "train_recorded": "train_recorded_s",
        "cpu_recorded": "cpu_recorded_s",
        "memory": "peak_memory_bytes",
        "tokens": "tokens_through_model",
    }
    ours, theirs = trainers["colograd"], trainers[other]
    return {name: theirs[key] / ours[key] for name, key in names.items() if key in ours}


def report(trainers: dict[str, dict[str, Any]], settings: dict[str, Any]) -> str:
    from figures import GB, table

    rows = []
    for key, name, form, unit in (
        ("step_s", "step, s", ".2f", 1.0),
        ("train_s", "training, s", ".2f", 1.0),
        ("train_recorded_s", "training on the same rollouts, s", ".2f", 1.0),
        ("cpu_recorded_s", "the same in processor seconds", ".2f", 1.0),
        ("generate_s", "generation, s", ".2f", 1.0),
        ("publish_s", "publishing weights, s", ".3f", 1.0),
        ("tokens_through_model", "tokens through the model", ",.0f", 1.0),
        ("tokens_recorded", "the same on the same rollouts", ",.0f", 1.0),
        ("forwards", "forwards", ",.0f", 1.0),
        ("completion_tokens", "mean completion, tokens", ".1f", 1.0),
        ("peak_memory_bytes", "peak memory, GB", ".2f", GB),
    ):
        if key not in trainers["colograd"]:
            continue  # without --repeats
        ours, *others = (trainer[key] / unit for trainer in trainers.values())
        ratio = [f"{value / ours:.1f}" if ours else "" for value in others]
        rows.append([name, *(f"{value:{form}}" for value in (ours, *others)), *ratio])
    head = (
        f"{settings['model']}, {settings['dtype']}, {settings['machine']}: {settings['prompts_per_step']} prompts of "
        f"{settings['prompt_tokens']} tokens x {settings['num_generations']} completions of at most "
        f"{settings['completion_tokens']} tokens; medians over {settings['steps']} step(s) of {settings['trials']} "
        "process(es) each"
    )
    names = [name.replace("trl", "TRL") for name in trainers]
    titles = ["A step", *names, *(f"{name} / colograd" for name in names[1:])]
    variants = [f"{name}: {VARIANTS[name]}." for name in trainers if name in VARIANTS]
    return "\n".join([head, "", table(titles, rows), "", *variants, NOTE])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.prepare_threads()
    process.quiet_logs(verbose=False)
    from figures import machine, write
    from phases import versions

    found: dict[str, list[dict[str, Any]]] = {trainer: [] for trainer in (*TRAINERS, *options.also)}
    with tempfile.TemporaryDirectory(prefix="colograd-bench-") as folder:
        for job in make_jobs(options, Path(folder)):
            found[job["trainer"]].append(run(job))
    settings = {
        **{name: value for name, value in vars(options).items() if name != "out"},
        "model": Path(options.model).name,
        "machine": machine(),
        "versions": versions("trl"),
    }
    trainers = {trainer: summary(trials) for trainer, trials in found.items()}
    print(report(trainers, settings))
    write(options.out, {"settings": settings, "trainers": trainers, "ratio": ratios(trainers)})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Published figures next to ours: each row of docs/measurements.md has a command, and this runs it.

    make records [ARGS="--only prime-rl --hours 1"]
    python tests/benchmarks/records.py --device cpu               a tiny form of each row: does the row itself work?

Each row runs in a process of its own, with random weights of the published model's shape where a folder isn't named by
--model NAME=FOLDER (throughput and memory don't depend on them). On a GPU the figures go into docs/records.json, by
the GPU's name, and docs/measurements.md is written anew; on a CPU they go into --out alone. Exit status 1 if a row
failed, 2 without such a device.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_check
from gpu_check import HERE, ROOT, Check, Result

DOCS = ROOT / "docs"
SHOWN = "tests/benchmarks/out/records"  # folder of models in commands for people
PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/blob/main/benchmarks/results/BENCHMARKS.md"
NEMO = "https://github.com/NVIDIA-NeMo/RL/blob/main/tests/test_suites/llm/grpo-qwen2.5-math-1.5b-instruct-1n8g-fsdp2tp1.v3.sh"
VERL = "https://github.com/volcengine/verl/blob/main/examples/prefix_grouper/README.md"
VERL_LORA = "https://github.com/eric-haibin-lin/verl-data/blob/experiments/gsm8k/Qwen2.5-1.5B-bsz64_2-prompt512-resp1024-lorarank32-score0.779.log"
TRL = "https://github.com/huggingface/trl"
GIB = 2**30
PROMPT = 128  # tokens of the prompt in rows with long completions


@dataclass(frozen=True)
class Record:
    name: str
    what: str
    published: str
    source: str  # URL
    shape: str  # of `random_model.py`
    runs: tuple[tuple[str, ...], ...]  # arguments of benchmarks, without the model
    tiny: tuple[tuple[str, ...], ...]  # small runs for a CPU
    tell: Callable[[Sequence[Mapping[str, Any]]], str]  # figures of the runs -> our cell
    differs: str = ""  # differences from the published measurement
    minutes: float = 10.0  # for each run

    def commands(self, model: str, on_cpu: bool) -> list[tuple[str, ...]]:
        """Return Python's arguments, a tuple for each run."""
        runs = self.tiny if on_cpu else self.runs
        return [(str(HERE / script), "--model", model, *given) for script, *given in runs]


def trainer_alone(tokens: int, *more: str) -> tuple[str, ...]:
    """Return arguments for two full-length sequences of ``tokens`` tokens per step, a row each."""
    return (
        "training_path.py", "--prompt-tokens", str(PROMPT), "--completion-tokens", str(tokens - PROMPT),
        "--num-generations", "2", "--prompts-per-step", "1", "--full-length", "--prompt-per-completion", "--set",
        f"max_tokens_per_microbatch={tokens}", "--set", "gradient_checkpointing=true", "--steps", "4", *more,
    )  # fmt: skip


def tiny_trainer_alone(*more: str) -> tuple[str, ...]:
    return (
        "training_path.py", "--prompt-tokens", "70", "--completion-tokens", "26", "--num-generations", "2",
        "--prompts-per-step", "1", "--full-length", "--prompt-per-completion", "--set", "max_tokens_per_microbatch=96",
        "--set", "gradient_checkpointing=true", "--steps", "2", *more,
    )  # fmt: skip


def tell_speed(found: Sequence[Mapping[str, Any]]) -> str:
    (run,) = found
    share = "" if run["utilisation"] is None else f", {run['utilisation']:.1%} MFU"
    return f"{run['tokens_per_second']:,.0f} tokens/s, {run['peak']['training'] / GIB:.1f} GiB{share}"


def tell_step(found: Sequence[Mapping[str, Any]]) -> str:
    (run,) = found
    seconds = run["seconds"]
    return f"{run['step_s']:.1f} s a step: generation {seconds['generate']:.1f}, update {seconds['train']:.1f}"


def tell_sharing(found: Sequence[Mapping[str, Any]]) -> str:
    shared, repeated = (run["seconds"]["train"] for run in found)
    return f"{shared:.2f} s instead of {repeated:.2f}: {repeated / shared:.2f} ×"


def tell_side_by_side(found: Sequence[Mapping[str, Any]]) -> str:
    ratio = found[0]["ratio"]
    return f"TRL / Colograd: step {ratio['step']:.2f}, training {ratio['train']:.2f}, peak memory {ratio['memory']:.2f}"


SHARED = (
    "training_path.py", "--prompt-tokens", "8192", "--completion-tokens", "1024", "--num-generations", "4",
    "--prompts-per-step", "8", "--full-length", "--set", "gradient_checkpointing=true", "--set",
    "max_tokens_per_microbatch=32768", "--lora", "16", "--steps", "4",
)  # fmt: skip
TINY_SHARED = (
    "training_path.py", "--prompt-tokens", "200", "--completion-tokens", "16", "--num-generations", "4",
    "--prompts-per-step", "2", "--full-length", "--set", "max_tokens_per_microbatch=1024", "--steps", "2",
)  # fmt: skip
TINY_STEP = (
    "training_path.py", "--sampled", "--prompt-tokens", "70", "--completion-tokens", "16", "--num-generations", "4",
    "--prompts-per-step", "2", "--steps", "2",
)  # fmt: skip

RECORDS = (
    Record(
        "prime-rl 0.6B",
        "Qwen3-0.6B in full, sequences of 16k tokens, layers computed twice",
        "11.9k tokens/s, 12.5 GiB, 11.1 % MFU (1 × H100)",
        PRIME,
        "qwen3-0.6b",
        (trainer_alone(16384),),
        (tiny_trainer_alone(),),
        tell_speed,
        "its trainer alone, too, on made-up rollouts; tokens over seconds of forward and backward",
    ),
    Record(
        "prime-rl 0.6B 64k",
        "the same, 64k tokens",
        "10.2k tokens/s, 19.6 GiB, 26.8 % MFU (1 × H100)",
        PRIME,
        "qwen3-0.6b",
        (trainer_alone(65536),),
        (tiny_trainer_alone(),),
        tell_speed,
    ),
    Record(
        "prime-rl 4B LoRA",
        "Qwen3-4B, LoRA of rank 16, 16k tokens",
        "6.2k tokens/s, 23.3 GiB (1 × H100)",
        PRIME,
        "qwen3-4b",
        (trainer_alone(16384, "--lora", "16"),),
        (tiny_trainer_alone("--lora", "4"),),
        tell_speed,
    ),
    Record(
        "prime-rl 4B LoRA 64k",
        "the same, 64k tokens",
        "4.2k tokens/s, 42.0 GiB (1 × H100)",
        PRIME,
        "qwen3-4b",
        (trainer_alone(65536, "--lora", "16"),),
        (tiny_trainer_alone("--lora", "4"),),
        tell_speed,
        minutes=20.0,
    ),
    Record(
        "NeMo-RL 1.5B",
        "Qwen2.5-Math-1.5B in full, 32 × 16 samples, context 512: seconds a step",
        "below 25 s (its nightly gate, 8 GPUs of 80 GB)",
        NEMO,
        "qwen2.5-1.5b",
        (
            (
                "training_path.py", "--sampled", "--prompt-tokens", "128", "--completion-tokens", "384",
                "--num-generations", "16", "--prompts-per-step", "32", "--steps", "4",
            ),
        ),
        (TINY_STEP,),
        tell_step,
        "one GPU; random weights, so that each completion has all its 384 tokens",
    ),
    Record(
        "verl 1.5B LoRA",
        "Qwen2.5-1.5B on GSM8K, LoRA of rank 32, 64 × 5 samples of at most 1,024 tokens: seconds a step",
        "generation 38.8 s, update 7.2 s in its last steps (2 GPUs)",
        VERL_LORA,
        "qwen2.5-1.5b",
        (
            (
                "training_path.py", "--sampled", "--prompt-tokens", "128", "--completion-tokens", "320",
                "--num-generations", "5", "--prompts-per-step", "64", "--lora", "32", "--set", "beta=0.001",
                "--steps", "4",
            ),
        ),
        (TINY_STEP + ("--lora", "4", "--set", "beta=0.001"),),
        tell_step,
        "one GPU; random weights, each completion has 320 tokens, about GSM8K's mean; without tensor parallelism",
    ),
    Record(
        "verl prefix grouper",
        "Qwen3-4B, prompts of 8k tokens, 4 completions each: the update with prompts shared and not",
        "5.98 s instead of 10.18: 1.70 × (4 × H800)",
        VERL,
        "qwen3-4b",
        (SHARED, (*SHARED, "--prompt-per-completion")),
        (TINY_SHARED, (*TINY_SHARED, "--prompt-per-completion")),
        tell_sharing,
        "LoRA of rank 16, so that one GPU holds it; completions of 1,024 tokens (theirs aren't said)",
        minutes=15.0,
    ),
    Record(
        "TRL",
        "Colograd and TRL's colocated trainer, the same model, prompts and engine settings, in turns",
        "TRL itself, on the same machine",
        TRL,
        "smollm2-135m",
        (
            (
                "side_by_side.py", "--prompt-tokens", "256", "--completion-tokens", "256", "--num-generations", "8",
                "--prompts-per-step", "8", "--rows-per-microbatch", "8", "--steps", "3", "--trials", "2", "--dtype",
                "bfloat16",
            ),
        ),
        (
            (
                "side_by_side.py", "--prompt-tokens", "70", "--completion-tokens", "8", "--num-generations", "4",
                "--prompts-per-step", "2", "--steps", "1", "--repeats", "0", "--dtype", "float32",
            ),
        ),
        tell_side_by_side,
        minutes=20.0,
    ),
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="records.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny form of each row")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the rows whose names begin so")
    parser.add_argument("--model", action="append", default=[], metavar="SHAPE=FOLDER", help="a model of your own")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "records", help="folder for what is found")
    parser.add_argument("--page", action="store_true", help="only write docs/measurements.md from docs/records.json")
    options = parser.parse_args(argv)
    for name in options.only or ():
        if not any(record.name.startswith(name) for record in RECORDS):
            known = ", ".join(record.name for record in RECORDS)
            parser.error(f"--only names {name!r}, with which no row begins. There are: {known}")
    shapes = {record.shape for record in RECORDS}
    options.models = dict(given.partition("=")[::2] for given in options.model)
    if other := sorted({*options.models} - shapes):
        parser.error(f"--model names {other[0]!r}, but rows are of {', '.join(sorted(shapes))}")
    return options


def model_for(shape: str, options: argparse.Namespace) -> str:
    """Return the folder of the named model, or of a new model with random weights."""
    if shape in options.models:
        return str(Path(options.models[shape]).resolve())
    on_cpu = options.device == "cpu"
    folder = options.out.resolve() / ("tiny" if on_cpu else shape)
    if not (folder / "config.json").exists():
        command = [sys.executable, str(HERE / "random_model.py"), str(folder)]
        command += ["--tiny"] if on_cpu else ["--shape", shape]
        subprocess.run(command, env=gpu_check.environment(), check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def run(record: Record, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row. ``ours`` is the table's cell, ``failed`` the error."""
    found, model = [], model_for(record.shape, options)
    for number, command in enumerate(record.commands(model, options.device == "cpu"), start=1):
        needs = "trl" if "side_by_side" in command[0] else "peft" if "--lora" in command else ""
        check = Check(f"{record.name} {number}", command, 1.0, gpu_check.last_line, needs=needs)
        result: Result = gpu_check.run(check, 60 * record.minutes, options.out)
        if result.status != "ok":
            return {"failed": f"{result.status}: {result.said}"}
        found.append(result.figures)
    return {"ours": record.tell(found)}


# -- the page

HEAD = """Models have random weights of the published shape, unless `--model SHAPE=FOLDER` names a model. `make records`
measures the rows on this machine's GPU and writes them here:

```bash
make records                                  # all rows, each within 10 or 20 minutes
```"""
MARKERS = ("<!-- records: written by tests/benchmarks/records.py (make records) -->", "<!-- end of records -->")
NOT_YET = "-"


def section(measured: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table. ``measured`` is GPU -> row's name -> our figure."""
    gpus = list(measured)
    header = ["Row", "What", "Published", *(f"Ours, {gpu}" for gpu in gpus)]
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join(['---'] * len(header))} |"]
    for record in RECORDS:
        ours = [measured[gpu].get(record.name, NOT_YET) for gpu in gpus]
        differs = f" Differs: {record.differs}." if record.differs else ""
        cells = [f"`{record.name}`", record.what + differs, f"[{record.published}]({record.source})", *ours]
        lines.append(f"| {' | '.join(cells)} |")
    state = "" if gpus else "\n\nNo row has been measured on a GPU yet."
    return f"{HEAD}{state}\n\n" + "\n".join(lines)


def page(measured: Mapping[str, Mapping[str, str]]) -> str:
    before, _, rest = (DOCS / "measurements.md").read_text().partition(MARKERS[0])
    return f"{before}{MARKERS[0]}\n\n{section(measured)}\n\n{MARKERS[1]}{rest.partition(MARKERS[1])[2]}"


def read_measured() -> dict[str, dict[str, str]]:
    path = DOCS / "records.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.page:
        (DOCS / "measurements.md").write_text(page(read_measured()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running row
    machine = gpu_check.look()
    if why := gpu_check.unfit(options.device, machine):
        print(f"records: {why.replace('gpu-check', 'records')}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        print("records: on a CPU, tiny sizes: whether each row works; the figures say nothing", flush=True)
    begin, results = tuple(options.only or [""]), {}
    for record in RECORDS:
        if record.name.startswith(begin):
            results[record.name] = found = run(record, options)
            told = found.get("ours") or f"FAILED: {found['failed']}"
            print(f"{record.name}: {told} | published: {record.published}", flush=True)
            (options.out / "records.json").write_text(
                json.dumps({"machine": machine, "rows": results}, indent=1) + "\n"
            )
            if options.device == "cuda" and "ours" in found:
                measured = read_measured()
                measured.setdefault(machine["machine"], {})[record.name] = found["ours"]
                (DOCS / "records.json").write_text(json.dumps(measured, indent=1) + "\n")
                (DOCS / "measurements.md").write_text(page(measured))
    return 1 if any("failed" in found for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

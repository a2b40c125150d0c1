"""Learning curves of TRL and Colograd on the quickstart's task: the same settings, seeds and model, the import changed.

    python tests/benchmarks/curves.py --seeds 42 1 2 --steps 24 --plot docs/curves.png --json curves.json

Each run is a process of its own; TRL's and ours alternate. Both get one dictionary of TRL's settings (`settings`),
float32 weights and a float32 engine. Further settings that TRL needs on a CPU are in `contestants.run_trl`. Prints a
table: the mean reward of the last ten steps and of all, and the seconds that the run took without its start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

from figures import table  # noqa: E402

LAST = 10  # number of last steps whose mean reward is compared
TRAINERS = ("trl", "colograd")
ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**28}


def settings(folder: str, steps: int, seed: int) -> dict[str, Any]:
    """Half of the quickstart's batch, under TRL's names."""
    return {
        "output_dir": folder,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 128,
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 48,
        "temperature": 1.0,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "max_steps": steps,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def train(trainer: str, model: str, steps: int, seed: int) -> dict[str, Any]:
    """Train in this process. Return each step's mean reward, and the seconds from the first step's start on."""
    from colograd.apps.quickstart.quickstart import sums
    from colograd.engine.building import check_vllm, live_weights
    from colograd.rewards import last_number

    check_vllm()
    further: dict[str, Any] = {}
    with contextlib.ExitStack() as while_built, tempfile.TemporaryDirectory() as folder:
        if trainer == "trl":
            from trl import GRPOConfig, GRPOTrainer
            from trl.generation import vllm_generation

            plain = vllm_generation.LLM
            vllm_generation.LLM = lambda **kwargs: plain(**kwargs, **ENGINE)
            while_built.enter_context(live_weights())
        else:
            from colograd import GRPOConfig, GRPOTrainer  # type: ignore[assignment]

            further["vllm_engine_kwargs"] = ENGINE
        config = GRPOConfig(**settings(folder, steps, seed), **further)
        made = GRPOTrainer(model=model, reward_funcs=last_number, args=config, train_dataset=sums())
        started = time.perf_counter()
        made.train()
        seconds = time.perf_counter() - started
    rewards = [entry["reward"] for entry in made.state.log_history if "reward" in entry]
    return {"trainer": trainer, "seed": seed, "rewards": rewards, "seconds": seconds}


def means(run: dict[str, Any]) -> tuple[float, float]:
    rewards = run["rewards"]
    return statistics.fmean(rewards[-LAST:]), statistics.fmean(rewards)


def report(runs: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    pairs = [
        tuple(next(r for r in runs if (r["trainer"], r["seed"]) == (name, seed)) for name in TRAINERS)
        for seed in dict.fromkeys(run["seed"] for run in runs)
    ]
    # columns of each seed, with TRL's value next to ours
    values = [[v for both in zip(means(t), means(c), strict=True) for v in both] for t, c in pairs]
    values = [[*rewards, t["seconds"], c["seconds"]] for rewards, (t, c) in zip(values, pairs, strict=True)]
    mean = [statistics.fmean(column) for column in zip(*values, strict=True)]
    rows = [
        [name, *(f"{v:.3f}" for v in row[:4]), *(f"{v:.0f}" for v in row[4:])]
        for name, row in zip([*(str(t["seed"]) for t, _ in pairs), "mean"], [*values, mean], strict=True)
    ]
    titles = (f"last {LAST} steps", "all steps", "seconds")
    header = ["seed", *(f"{who}: {title}" for title in titles for who in ("TRL", "Colograd"))]
    figures = {"reward.trl": mean[0], "reward.colograd": mean[1], "ratio.seconds": mean[4] / mean[5]}
    return table(header, rows), figures


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for trainer, color in zip(TRAINERS, ("tab:orange", "tab:blue"), strict=True):
        curves = [run["rewards"] for run in runs if run["trainer"] == trainer]
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=color, alpha=0.3, linewidth=1)
        axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2, label=trainer)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--runs", type=Path, help="a folder for each run's figures; those that are there are kept")
    parser.add_argument("--one", choices=TRAINERS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.one:
        process.quiet_logs(verbose=False)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        process.keep_freed_memory()
        options.json.write_text(json.dumps(train(options.one, options.model, options.steps, options.seeds[0])))
        return 0
    with contextlib.ExitStack() as stack:
        folder = options.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        files = [(name, seed, folder / f"{name}-{seed}.json") for seed in options.seeds for name in TRAINERS]
        for name, seed, file in files:
            if not file.exists():
                print(f"curves: {name}, seed {seed}", file=sys.stderr, flush=True)
                given = ["--model", options.model, "--steps", str(options.steps), "--seeds", str(seed)]
                command = [sys.executable, __file__, *given, "--one", name, "--json", str(file)]
                subprocess.run(command, check=True, stdout=sys.stderr)
        runs = [json.loads(file.read_text()) for _, _, file in files]
    shown, figures = report(runs)
    print(shown)
    if options.plot:
        plot(runs, options.plot)
    if options.json:
        options.json.write_text(json.dumps({**figures, "runs": runs}, indent=1))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # An engine that another package holds may not end.

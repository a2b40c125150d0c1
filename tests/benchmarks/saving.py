"""Cost of a checkpoint after every step: the quickstart's step with one and without, in turn, in one run.

    python tests/benchmarks/saving.py [--steps 16] [--now]

Every step has the same prompts, seeds and weights (the learning rate is 0), so only the saving differs.
A checkpoint that is begun after a step is written during the next one: a step counts from the end of the one before it
to its own. `--now`: checkpoints that training waits for (`save_in_background: false`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from colograd.runtime import process

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "grpo_smollm2_cpu.yaml"
WARM = 2  # uncounted first steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help="that are counted, half of them with a checkpoint")
    parser.add_argument("--now", action="store_true", help="wait for each checkpoint")
    options = parser.parse_args()
    process.quiet_logs(False)
    runs = Path("runs")  # on the disk that is measured
    runs.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=runs))
    try:
        measure(folder, options.steps, options.now)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, steps: int, now: bool) -> None:
    process.prepare_ranks()
    from transformers import TrainerCallback

    from colograd import GRPOTrainer
    from colograd.config import parse_arguments
    from colograd.data import load_datasets

    flags = {
        "output_dir": folder, "learning_rate": 0.0, "warmup_steps": 0, "max_steps": WARM + steps + 1,
        "save_strategy": "no", "save_total_limit": 2, "log_completions": False, "resume_from_checkpoint": "false",
        "save_in_background": not now,
    }  # fmt: skip
    command = ["--config", str(RECIPE), *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]
    script, config, model, _ = parse_arguments(command)

    class SameSteps(GRPOTrainer):
        """Each step repeats the first step's prompts and seeds in the same order."""

        first: Any = None

        def generate(self, prompts: Any) -> Any:
            prompts = list(prompts)
            self.first = self.first or prompts
            given = {mine.position: theirs for mine, theirs in zip(self.first, prompts, strict=True)}
            for group in super().generate(self.first):
                yield dataclasses.replace(group, position=given[group.position].position)

    class InTurn(TrainerCallback):
        """Callback that requests a checkpoint after every second step."""

        ends: list[tuple[float, float]]  # wall-clock and processor seconds at each step's end

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.ends.append((time.perf_counter(), time.process_time()))
            control.should_save = state.global_step % 2 == 1 and state.global_step < state.max_steps

    took, written = [], []
    turns = InTurn()
    turns.ends = []
    trainer = SameSteps(model.model_name_or_path, script.all_rewards(), config, load_datasets(script)[0])
    trainer.callback_handler.callbacks.insert(0, turns)
    save = trainer._save_checkpoint

    def timed_save(*args: Any) -> None:
        began = time.perf_counter()
        save(*args)
        took.append(time.perf_counter() - began)
        if (present := trainer.checkpointer.writer.present) is not None:
            written.append(present)

    trainer._save_checkpoint = timed_save
    trainer.train()
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    trainer.close()
    print("the save's own part, before the step goes on:", " ".join(f"{s:.2f}" for s in took))
    print("until it was there, beside the training:", " ".join(f"{s.seconds:.2f}" for s in written))
    print(f"checkpoints left: {', '.join(left)}")
    for name, ends in zip(("seconds", "processor seconds"), zip(*turns.ends, strict=True), strict=True):
        compare(name, ends, steps)


def compare(name: str, ends: Sequence[float], steps: int) -> None:
    """Print seconds of steps with and without a checkpoint, and the difference with its standard error."""
    lengths = [later - earlier for earlier, later in itertools.pairwise(ends)]  # of steps 2, 3 ...
    counted = lengths[WARM - 1 :][:steps]
    begins = WARM + 1  # number of the first counted step
    saving = [
        length for number, length in enumerate(counted, begins) if number % 2 == 0
    ]  # steps that a checkpoint precedes
    without = [length for number, length in enumerate(counted, begins) if number % 2 == 1]
    print(f"{name}, with   ", " ".join(f"{length:.2f}" for length in saving))
    print(f"{name}, without", " ".join(f"{length:.2f}" for length in without))
    more = [a - b for a, b in zip(saving, without, strict=False)]
    mean, error = statistics.mean(more), statistics.stdev(more) / len(more) ** 0.5
    base = statistics.mean(without)
    print(
        f"a step has {base:.2f} {name} without a checkpoint, and {mean:+.2f} ± {error:.2f} with one: "
        f"{mean / base:+.1%} ± {error / base:.1%}"
    )


if __name__ == "__main__":
    main()

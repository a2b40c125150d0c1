"""Steps to a reward of 0.8 on the quickstart's task: by rewards, and from a copy of the model that has learnt it.

    python tests/benchmarks/distillation.py --seeds 42 1 2 --runs runs/distillation --json distillation.json

The run by rewards is the quickstart's recipe; its saved model of the first seed is the teacher of all other runs. The
distilled runs have the same recipe and seeds, with `distillation_kl: sampled` and `exact`, and the weight of rewards is
0: they are logged and not trained on. Prints a table: the first step that ends three with a mean reward of 0.8 or more,
and the mean reward of the last five steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import table

ROOT = Path(__file__).parents[2]
WAYS = ("rewards", "sampled", "exact")
GOAL, MEAN_OF = 0.8, 3
REWARD = "rewards/last_number/mean"


def settings(way: str, seed: int, steps: int, folder: Path, teacher: Path) -> dict[str, object]:
    given = {
        "output_dir": folder, "seed": seed, "max_steps": steps, "save_strategy": "no", "report": False,
        "journal": "off", "log_completions": False,
    }  # fmt: skip
    if way == "rewards":
        return given
    return given | {"teacher_model_name_or_path": teacher, "distillation_kl": way, "reward_weights": 0}


def rewards_of(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[REWARD] for entry in history if REWARD in entry]


def train(way: str, seed: int, steps: int, folder: Path, teacher: Path, more: Sequence[str] = ()) -> list[float]:
    """Train in a new process with ``more`` settings NAME=VALUE. A finished run isn't trained again."""
    if not (folder / "trainer_state.json").exists():
        print(f"distillation: {way}, seed {seed}", file=sys.stderr, flush=True)
        given = settings(way, seed, steps, folder, teacher)
        given |= dict(text.partition("=")[::2] for text in more)
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        recipe = ["--config", str(ROOT / "recipes" / "grpo_smollm2_cpu.yaml")]
        command = [sys.executable, "-m", "colograd.train", *recipe, *flags]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
    return rewards_of(folder)


def steps_to_goal(rewards: Sequence[float]) -> int | None:
    """Return the first step that ends `MEAN_OF` steps with a mean reward of `GOAL`, or None."""
    ends = range(MEAN_OF, len(rewards) + 1)
    return next((end for end in ends if statistics.fmean(rewards[end - MEAN_OF : end]) >= GOAL), None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--distilled-steps", type=int, default=16)
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:])
    parser.add_argument("--runs", type=Path, required=True, help="a folder for the runs; those that are there are kept")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="of every run, as a smaller model"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    teacher, found, rows = (options.runs / f"rewards-{options.seeds[0]}").absolute(), [], []
    for seed in options.seeds:
        for way in (WAYS[0], *options.ways):
            steps = options.steps if way == WAYS[0] else options.distilled_steps
            folder = (options.runs / f"{way}-{seed}").absolute()
            rewards = train(way, seed, steps, folder, teacher, options.set)
            found.append({"way": way, "seed": seed, "rewards": rewards, "steps": steps_to_goal(rewards)})
            reached = str(found[-1]["steps"] or f"more than {len(rewards)}")
            rows.append([str(seed), way, reached, f"{statistics.fmean(rewards[-5:]):.3f}"])
    print(table(["seed", "trained by", f"steps to {GOAL}", "last 5 steps"], rows))
    if options.json:
        options.json.write_text(json.dumps({"runs": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

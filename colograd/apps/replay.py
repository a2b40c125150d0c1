"""Train recorded steps of a run again, without an engine.

colograd replay RUN --step N [--to M] [--profile [FOLDER]] [--any_flag value]
torchrun --nproc-per-node 2 -m colograd.apps.cli replay RUN --step N

Starts at the last checkpoint before step N, or at the initial model if there is none. Trains on the run's recorded
rollouts: nothing is sampled, no reward function is called, and nothing is written into RUN. Prints the loss and
gradient norm of steps N to M next to the recorded ones. --profile writes a trace and a table of operators of these
steps (default: replay-N-M in the current directory).

Settings come from RUN's recorded recipe, or from --config. Flags may change settings that only training depends on,
such as --optim, --loss_type or --max_tokens_per_microbatch. The exit status is 2 for bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime import process
from ..train import start

IGNORED_PREFIXES = (  # A replay ignores settings whose names begin with these: they concern files and evaluations.
    "save_", "eval_", "hub_", "push_to_hub", "log_completions", "load_best", "metric_for_best", "greater_is_better",
    "do_", "resume_from_checkpoint", "output_dir", "report_to",
)  # fmt: skip
SET = {
    "report_to": "none", "save_strategy": "no", "journal": "keep", "report": False, "disable_tqdm": True,
    "reward_workers": 0,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    process.quiet_logs(process.is_verbose(argv))

    def replayer(**given: Any) -> Any:
        from .replaying.replayer import Replay, Replayer

        replay = Replay(options.run, options.step, options.to)
        return Replayer(replay=replay, profile=options.profile, flags=shlex.join(flags), **given)

    with contextlib.ExitStack() as closing:
        scratch = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="colograd-replay-")))
        try:
            options, flags = parse(argv)
            trainer = start(["--config", str(write_recipe(options, flags, scratch))], replayer)
            if trainer is None:
                return 2
            closing.callback(trainer.close)
            trainer.train()
        except ValueError as error:
            if process.is_verbose(argv):
                raise
            print(f"colograd replay: error: {error}", file=sys.stderr)
            return 2
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    if not argv or argv[0].startswith("-"):
        raise ValueError("the run's folder is missing: write `colograd replay RUN --step N`.")
    parser = argparse.ArgumentParser(prog="colograd replay", allow_abbrev=False, exit_on_error=False)
    add = parser.add_argument
    add("run", type=Path)
    add("--step", type=int)
    add("--to", type=int)
    add("--profile", nargs="?", type=Path, const=Path())
    add("--config", type=Path)
    try:
        options, flags = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from None
    if not options.run.is_dir():
        raise ValueError(f"the run {str(options.run)!r} is no folder: give the run's output_dir.")
    if options.step is None or options.step < 1:
        given = "missing" if options.step is None else options.step
        raise ValueError(f"--step is {given}, but must be a step of the run, at least 1: write --step 3, for example.")
    options.to = options.step if options.to is None else options.to
    if options.to < options.step:
        raise ValueError(f"--to is {options.to}, but must be at least --step ({options.step}): raise it.")
    if options.profile == Path():
        options.profile = Path(f"replay-{options.step}-{options.to}")
    if options.profile is not None and options.profile.resolve().is_relative_to(options.run.resolve()):
        raise ValueError(
            f"--profile is {str(options.profile)!r}, but a replay writes nothing into the run's folder: name a folder "
            "outside of it."
        )
    return options, flags


def write_recipe(options: argparse.Namespace, flags: Sequence[str], scratch: Path) -> Path:
    """Write the run's recipe, changed by ``flags`` and `SET`, into ``scratch``. Return the path of this file."""
    from ..config import given_settings
    from ..rollout.store import FOLDER, RECIPE

    recipe = options.config or options.run / FOLDER / RECIPE
    if options.config is None and not recipe.is_file():
        raise ValueError(
            f"{options.run} has no recorded recipe ({FOLDER}/{RECIPE}). `colograd train` records it if "
            "`journal` is `keep` or `until_checkpoint`. Give the run's recipe with --config."
        )
    given = given_settings(["--config", str(recipe), *flags])
    taken = {name: value for name, value in given.items() if not name.startswith(IGNORED_PREFIXES)}
    path = scratch / "recipe.yaml"
    path.write_text(json.dumps(taken | SET | {"output_dir": str(scratch / "run")}))  # YAML can read JSON.
    return path

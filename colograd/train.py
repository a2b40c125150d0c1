"""Train from a recipe (a YAML file of settings): parse the settings, build the trainer, train, save, push.

accelerate launch colograd/train.py --config recipes/X.yaml [--any_flag value]
torchrun --nproc-per-node 2 -m colograd.train --config recipes/X.yaml
python -m colograd.train --config recipes/X.yaml        (the same as `colograd train`)
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:
    # Python puts a script's folder first on `sys.path`: modules in colograd/ would shadow installed ones.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from colograd import __version__
from colograd.runtime import process
from colograd.runtime.waiting import while_waiting

if TYPE_CHECKING:
    from colograd import GRPOConfig, GRPOTrainer
    from colograd.config import ModelConfig, ScriptArguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training. Return the process's exit status, which is 2 if `start` has printed an error."""
    argv = process.command_arguments(argv)
    if {"-h", "--help"} & set(argv):
        from colograd.config.parse import flags_help

        print(__doc__, "Flags, which docs/configuration.md has in sections:", flags_help(), sep="\n")
        return 0
    if not process.is_verbose(argv):
        process.tell_briefly()
    trainer = start(argv)
    if trainer is None:
        return 2
    try:
        return run(trainer)
    except KeyboardInterrupt:  # The training's second Ctrl-C, or one outside of it. The first requests a stop.
        if process.is_verbose(argv):
            raise
        print("stopped at once by Ctrl-C, without a new checkpoint", file=sys.stderr, flush=True)
        return 130


def start(argv: Sequence[str], kind: Callable[..., GRPOTrainer] | None = None) -> GRPOTrainer | None:
    """Make the trainer for a command line. Print an error in one line and return None. With `verbose`, raise the error.

    ``kind``: class of the trainer, by default `GRPOTrainer`."""
    try:
        process.follow_launcher()
        first = f"colograd {__version__}: loading the libraries"
        shown = os.environ.get("RANK", "0") == "0"

        def stage() -> str:  # Returns "" until the watchdog is imported.
            at = getattr(sys.modules.get("colograd.parallel.watchdog"), "stage", None)
            return "" if at is None else str(at())

        with process.rank_variables(), process.collector_at_rest(), while_waiting(first, stage, shown):
            return build(argv, kind)
    except (ValueError, RuntimeError, TypeError) as error:
        if process.is_verbose(argv):
            raise
        print(f"colograd: error: {error}", file=sys.stderr)
        return None


def build(argv: Sequence[str], kind: Callable[..., GRPOTrainer] | None = None) -> GRPOTrainer:
    """Make the trainer that a command line describes. ``kind``: class of the trainer, by default `GRPOTrainer`.

    Exit with status 0 if the run to resume (`resume_from_checkpoint: auto` or `true`) has finished its `max_steps`,
    unless ``kind`` or `push_to_hub` is set."""
    import yaml

    from colograd.config import given_settings, parse_arguments
    from colograd.reporting.redaction import without_secrets

    script, config, model, recipe = parse_arguments(argv)
    if model.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing: give a folder or a Hub id.")
    if not (script.all_rewards() or script.environment_factory or script.agent or config.distils):
        raise ValueError("reward_funcs is missing: give at least one name or import path of a reward function.")
    if kind is None and not config.push_to_hub:
        from colograd.checkpoint.search import finished_checkpoint, nothing_left

        checkpoint = finished_checkpoint(config.resume_from_checkpoint, str(config.output_dir), config.max_steps)
        if checkpoint is not None:
            if config.process_index == 0:
                print(nothing_left(checkpoint, config.max_steps))
            raise SystemExit(0)
    trainer = make_trainer(script, config, model, kind)
    trainer.facts |= {
        "recipe": recipe,
        "command": shlex.join(["colograd", "train", *argv]),
        "dataset": dataset_names(script),
        "settings": without_secrets(yaml.safe_dump(given_settings(argv), sort_keys=False)),
    }
    return trainer


def dataset_names(script: ScriptArguments) -> list[str]:
    """Return the recipe's dataset names, and GSM8K's Hub id for `colograd.rewards.gsm8k` without `dataset_kwargs`."""
    from colograd.rewards import gsm8k

    parts = script.datasets if isinstance(script.datasets, list) else []
    names = [name for name in (script.dataset_name, *(str(part.get("path")) for part in parts)) if name]
    own = [gsm8k.PATH for name in names if name.partition(":")[0] == gsm8k.__name__ and not script.dataset_kwargs]
    return [*names, *own]


def make_trainer(
    script: ScriptArguments, config: GRPOConfig, model: ModelConfig, kind: Callable[..., GRPOTrainer] | None = None
) -> GRPOTrainer:
    from colograd.parallel.ranks import on_all_ranks
    from colograd.policy.supported import check_supported

    config.resolve_loading(**{**model.init_kwargs(), **(config.model_init_kwargs or {})})  # type: ignore[dict-item]
    with on_all_ranks("the start"):  # before the import of the trainer, which takes long
        check_supported(model.model_name_or_path, config, model.peft_config())

    from colograd import GRPOTrainer
    from colograd.data import load_datasets

    gc.freeze()  # The libraries' objects live as long as the process, so garbage collections may skip them.
    with on_all_ranks("loading the data"):
        train_dataset, eval_dataset = load_datasets(script)
    evaluates = config.do_eval or config.eval_on_start
    if script.exams:
        from colograd.runtime import registry

        if not evaluates:
            raise ValueError(
                f"`exams` is {script.exams}, but nothing is evaluated: set eval_strategy: steps or eval_on_start: true."
            )
        (names_of,) = registry.hooks("benchmark_names")
        names, test = names_of(script.exams), script.dataset_test_split
        if eval_dataset is not None and test in names:
            raise ValueError(
                f"`dataset_test_split` is {test!r}, which is also a benchmark in `exams`: rename the dataset's split, "
                "or remove the benchmark from `exams`."
            )
        eval_dataset = {**({} if eval_dataset is None else {test: eval_dataset}), **names}
    trainer = (kind or GRPOTrainer)(
        model=model.model_name_or_path or "",
        reward_funcs=script.all_rewards(),
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset if evaluates else None,
        peft_config=model.peft_config(),
        tools=script.tools,
        rollout_func=script.rollout_func,
        environment_factory=script.environment_factory,
        agent=script.agent,
    )
    if model.attn_implementation is not None:
        trainer.console.say(f"attention: packed (attn_implementation: {model.attn_implementation} isn't needed)")
    return trainer


def run(trainer: GRPOTrainer) -> int:
    from colograd.reporting.console import reward_ends

    config = trainer.args
    trainer.train()
    state, stop_signal = trainer.state, trainer.checkpointer.stop_signal
    if stop_signal.received and state.global_step < state.max_steps:
        trainer.console.say(
            f"stopped by {stop_signal.received} at step {state.global_step} of {state.max_steps}: the same command "
            "goes on from there with resume_from_checkpoint: auto"
        )
        if stop_signal.has_deadline:
            stop_signal.end_process()
        return stop_signal.status
    trainer.save_model(config.output_dir)
    trainer.save_state()
    if config.push_to_hub:
        trainer.push_to_hub()
    else:
        trainer.create_model_card()
    rewards = [entry["reward"] for entry in state.log_history if "reward" in entry]
    folder = os.path.relpath(config.output_dir)
    report = f"; what it did is in {folder}/report.html" if config.report else ""
    trainer.console.say(f"saved to {folder}{reward_ends(rewards)}{report}")
    trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

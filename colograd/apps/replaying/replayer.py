"""A trainer that trains a run's recorded steps again, without vLLM and without reward functions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import TrainOutput

from ...batch import Group, Prompt
from ...checkpoint.folders import complete_steps, step_of
from ...checkpoint.search import find_damage
from ...config import GRPOConfig
from ...parallel.ranks import gather, on_all_ranks
from ...rewards.functions import as_list
from ...rollout.record_file import FIGURES, steps_in
from ...rollout.sampler import Sampler
from ...rollout.store import About, JournalError, RolloutStore, files_of
from ...trainer import GRPOTrainer
from ...training.checkpointer import Checkpointer
from ...training.preparation import PreparedRun, reader_of
from ...training.recorded_settings import OF_GROUPS, settings_of

MOST_FIGURE_BYTES = 2**24  # Maximum bytes to read of each file of recorded losses and gradient norms.
PROFILE_ROWS = 30


@dataclass(frozen=True, slots=True)
class Replay:
    run: Path
    first: int
    last: int

    def starts(self) -> list[int]:
        """Return the steps of checkpoints before ``first``, in descending order, followed by 0 (the initial model)."""
        before = {step for step in complete_steps(str(self.run)) if 0 < step < self.first}
        return [*sorted(before, reverse=True), 0]


def steps_named(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


class ReplayStore(RolloutStore):
    """The replayed run's rollout log (the record of sampled groups), which a replay only reads.

    Settings that only training depends on may differ from the recorded ones.
    """

    def __init__(self, replay: Replay, rank: int, settings: Mapping[str, object], reader: Any = None) -> None:
        super().__init__(replay.run, rank, settings, reader, OF_GROUPS)
        self.replay = replay

    def check_recorded(self, start: int, args: GRPOConfig) -> None:
        for number, folder in self._folders():
            for path, found, _ in files_of(folder) if number >= start else ():
                self._check_settings(found, path)
        wanted = (args.prompts_per_step or 1) * (args.steps_per_generation or 1)
        for step in range(start, self.replay.last, args.round_length):
            if (number := len(self.positions(step))) >= wanted:
                continue
            is_there = f"has {number} of its {wanted} groups" if number else "isn't recorded"
            rounds = list(self.rounds())
            recorded = "nothing"
            if rounds:
                recorded = f"{len(rounds)} round(s) of {steps_named(rounds[0] + 1, rounds[-1] + args.round_length)}"
            later = sorted(step for step in complete_steps(str(self.replay.run)) if step > start)
            others = f" (all checkpoints: steps {', '.join(map(str, later))})" if later else ""
            origin = f"checkpoint-{start}" if start else f"the initial model, as no whole checkpoint is earlier{others}"
            raise JournalError(
                f"{steps_named(self.replay.first, self.replay.last)} of {self.replay.run} can't be trained again: the "
                f"replay would begin at {origin}, but the round of {steps_named(step + 1, step + args.round_length)} "
                f"{is_there} in {self.folder}. That folder holds {recorded}. Choose `--step` and `--to` so that every "
                "round from the checkpoint before `--step` to `--to` is recorded. `journal: keep` records all rounds "
                "of a run. A lower `save_steps` writes more checkpoints, a higher `save_total_limit` keeps more."
            )

    def lacks(self, problem: str) -> None:
        raise JournalError(problem)

    def _open(self, folder: Path, about: About, evaluation: str) -> None:
        """Open no file, so that nothing is written into the rollout log."""
        self._round = None

    def _check_weights(self, found: About, now: About, path: Path) -> None:
        """Only warn if the weights differ from those that sampled the groups: a replay may use other settings."""
        self._weights_are_read = False
        super()._check_weights(found, now, path)
        if self.warning:
            self.warning = (
                f"replay: the weights of step {now.step} differ from the weights that sampled its recorded groups, and "
                "are trained on these groups nevertheless"
            )

    @property
    def _remedy(self) -> str:
        return "a replay trains the groups as they were recorded, so leave it as it was"


def read_figures(folder: Path) -> dict[int, dict[str, float]]:
    """Return each step's loss and gradient norm, from a round's folder. If a step has several lines, use the first."""
    figures_of = dict[int, dict[str, float]]()
    for step, entry in steps_in(folder / FIGURES, MOST_FIGURE_BYTES):
        try:
            figures_of.setdefault(step, {str(name): float(value) for name, value in entry.items()})
        except (ValueError, TypeError, OverflowError):
            continue
    return figures_of


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.9g}" for name, value in figures.items())


class ReplaySampler(Sampler):
    def __post_init__(self) -> None:
        super().__post_init__()
        # Only an engine's first rank reads recorded groups, because it recorded the groups of all the engine's ranks.
        self.on_leader = lambda draw, others: others if self.config.layout.engine_place else draw()

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def generate(self, prompts: Sequence[Prompt], own: Any = None) -> Iterator[Group]:
        if prompts:
            positions = ", ".join(str(prompt.position) for prompt in prompts[:3])
            raise ValueError(
                f"{len(prompts)} group(s) of the round after step {self.hooks.state.global_step} aren't recorded (the "
                f"first are at positions {positions} of the stream of prompts), and a replay has no engine to sample "
                "them: choose `--step` and `--to` in rounds whose groups are recorded."
            )
        yield from ()


class Unasked:
    """Stand-in for a reward function. A replay uses recorded rewards, so a call is an error."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, **columns: Any) -> list[float]:
        raise RuntimeError(f"a replay must use recorded rewards, but called the reward function {self.__name__!r}")


class Replayer(GRPOTrainer):
    """A trainer of recorded steps.

    ``flags`` are the settings that the command changes. ``profile`` is the folder to write a profile into.
    """

    samples = False

    def __init__(
        self,
        *,
        replay: Replay,
        args: GRPOConfig,
        reward_funcs: Any = None,
        profile: Path | None = None,
        flags: str = "",
        **given: Any,
    ) -> None:
        self.replay, self.profile, self.flags = replay, profile, flags
        args.resolve_replay()
        with on_all_ranks("the journal"):
            recorded = RolloutStore(replay.run, args.layout.rank, {}).recorded_settings().get("reward_funcs")
            names = [*map(str, recorded)] if isinstance(recorded, list) else []
            functions = as_list(reward_funcs)  # Without those of tool environments, which are added later.
            rewards = [Unasked(name) for name in [*names, *("reward" for _ in functions)][: len(functions)]]
            if 0 < args.max_steps < replay.last:
                raise ValueError(
                    f"the replay's last step is {replay.last}, but max_steps is {args.max_steps}: name steps of the "
                    "run, or set max_steps to the run's value."
                )
            rounds, start = ReplayStore(replay, args.layout.rank, settings_of(args, names)), replay.starts()[0]
            rounds.check_recorded(start, args)
        given |= {"rollout_func": None, "reward_processing_classes": None, "eval_dataset": None}
        super().__init__(reward_funcs=rewards, args=args, **given)
        self._recorded_figures: dict[int, dict[str, float]] = {}
        for folder in self.rounds.rounds().values():
            self._recorded_figures |= read_figures(folder)
        self._apart: list[dict[str, float]] = []  # Per step: differences from the recorded loss and gradient norm.

    sampler_class = ReplaySampler

    def _make_sampler(self, task: PreparedRun) -> Any:
        settings = settings_of(self.args, self.learner.reward_names)
        self.rounds = ReplayStore(self.replay, self.args.layout.rank, settings, reader_of(self.policy))
        self.journal = None if self.args.layout.engine_place else self.rounds
        return super()._make_sampler(task)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        output = super().train()
        equal = sum(not any(each.values()) for each in self._apart)
        line = f"replay: {equal} of {len(self._apart)} step(s) came out bit for bit as recorded"
        if not self._apart:
            line = "replay: no recorded figures to compare with"
        elif equal < len(self._apart):
            why = "on a GPU, or with other ranks, threads or kernels, sums round otherwise"
            apart = ", ".join(f"{name} {max(each[name] for each in self._apart):.2g}" for name in self._apart[0])
            line += f"; the largest differences: {apart} ({f'with {self.flags}' if self.flags else why})"
        self.console.say(line)
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.profile is not None and self.state.global_step + 1 == self.replay.first:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        return super().training_step(*args, **kwargs)

    def report_step(self, metrics: Mapping[str, float]) -> None:
        step, figures = self.state.global_step, self.learner.figures
        self.control.should_training_stop |= step >= self.replay.last
        if step < self.replay.first:
            return
        written = ""
        if self.profile is not None and step == self.replay.last:
            with on_all_ranks("the profile"):
                written = self._write_profile(self.profile)
        line, was = f"replay: step {step}: {_shown(figures)}", self._recorded_figures.get(step)
        if was is not None:
            self._apart.append({name: abs(value - was.get(name, math.nan)) for name, value in figures.items()})
            is_equal = not any(self._apart[-1].values())
            line += "; as recorded, bit for bit" if is_equal else f"; recorded: {_shown(was)}"
        elif self._recorded_figures:
            line += "; no figures of its first training are recorded"
        self.console.step(step, self.state.max_steps, metrics)
        self.console.say(line)
        if written:
            self.console.say(written)

    def _write_profile(self, folder: Path) -> str:
        self._profiler.stop()
        suffix = f"-rank{self.args.layout.rank}" if self.args.layout.world_size > 1 else ""
        trace, table = folder / f"trace{suffix}.json", folder / f"operators{suffix}.txt"
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(trace))
            rows = self._profiler.key_averages().table(sort_by=by, row_limit=PROFILE_ROWS)
            table.write_text(rows, encoding="utf-8")
        except (OSError, RuntimeError) as error:  # Writing a trace may raise RuntimeError.
            return f"profile: {folder} can't be written ({error})"
        return f"profile: {trace} (for chrome://tracing or Perfetto) and {table}"

    def make_checkpointer(self) -> Checkpointer:
        return ReplayCheckpoints(self, self.replay)

    def _open_records(self, checkpoint: str | None, resumes: bool) -> None:
        start = step_of(checkpoint) if checkpoint else 0
        with on_all_ranks("the journal"):
            self.rounds.check_recorded(start, self.args)
        first, last, origin = self.replay.first, self.replay.last, f"checkpoint-{start}" if start else "the model"
        trained, shows = steps_named(start + 1, last), f", and shows {steps_named(first, last)}"
        trains = f"replay: trains {trained} of {self.replay.run} again from {origin} on"
        self.console.say(trains + (shows if start + 1 < first else ""))


class ReplayCheckpoints(Checkpointer):
    """The replayed run's checkpoints, which a replay only reads."""

    def __init__(self, trainer: GRPOTrainer, replay: Replay) -> None:
        super().__init__(trainer)
        self.replay = replay

    def _resolve_folders(self) -> bool:
        return False

    def find(self, wanted: str | bool | None) -> str | None:
        for start in gather(self.replay.starts())[0]:
            if not start:
                break
            folder, console = str(self.replay.run / f"checkpoint-{start}"), self.trainer.console
            if (damage := find_damage(folder, self.args.layout, self.nodes_are_apart, console)) is None:
                return folder
            console.warn(f"checkpoints: {folder} is damaged and isn't taken: {damage}")
        return None

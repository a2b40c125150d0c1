"""`Replayer`: a `GRPOTrainer` that trains a run's recorded steps again, without an engine and without rewards.

the checkpoint before the steps --> the recorded rounds after it, up to the last step --> a comparison of figures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from ...checkpoint.folders import step_of
from ...checkpoint.search import find_damage
from ...config import GRPOConfig
from ...parallel.ranks import gather, on_all_ranks
from ...rewards.functions import as_list
from ...rollout.store import RolloutStore
from ...trainer import GRPOTrainer
from ...training.checkpointer import Checkpointer
from ...training.preparation import PreparedRun
from ...training.prompts import reader_of
from ...training.recorded_settings import settings_of
from .recorded import Comparison, Replay, ReplaySampler, ReplayStore, StepProfile


class Unasked:
    """A placeholder for a reward function, because a replay takes the recorded rewards."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, **columns: Any) -> list[float]:
        raise RuntimeError(f"a replay asked reward function {self.__name__!r}, but takes what was recorded of it")


class Replayer(GRPOTrainer):
    """Trains recorded steps again.

    Args:
        flags: command-line flags that changed the run's settings, for the summary.
        args: the run's configuration with a folder of its own and ``journal: keep``, without saving, evaluation and
            reports.
        reward_funcs: the run's reward functions; never called.
        given: the other arguments of `GRPOTrainer`.

    Raises:
        ValueError: an error of `GRPOTrainer`, steps without a record, or settings that don't fit the records.
    """

    samples = False

    def __init__(
        self,
        *,
        replay: Replay,
        args: GRPOConfig,
        reward_funcs: Any = None,
        profile: StepProfile | None = None,
        flags: str = "",
        **given: Any,
    ) -> None:
        self.replay, self.profile, self.flags = replay, profile, flags
        args.resolve_replay()
        with on_all_ranks("the journal"):
            recorded = RolloutStore(replay.run, args.layout.rank, {}).recorded_settings().get("reward_funcs")
            names = [*map(str, recorded)] if isinstance(recorded, list) else []
            rewards = _unasked(as_list(reward_funcs), names)
            _check_end(replay, args)
            rounds, start = ReplayStore(replay, args.layout.rank, settings_of(args, names)), replay.starts()[0]
            rounds.check_recorded(start, args)
        given |= {"rollout_func": None, "reward_processing_classes": None, "eval_dataset": None}
        super().__init__(reward_funcs=rewards, args=args, **given)
        self.comparison = Comparison(self.rounds)
        self.add_callback(_EndAfter(replay.last))

    sampler_class = ReplaySampler

    def _make_sampler(self, task: PreparedRun) -> Any:
        settings = settings_of(self.args, self.learner.reward_names)
        self.rounds = ReplayStore(self.replay, self.args.layout.rank, settings, reader_of(self.policy))
        self.journal = None if self.args.layout.engine_place else self.rounds
        return super()._make_sampler(task)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train from the checkpoint before the first step to the end of the last step."""
        output = super().train()
        self.console.say(self.comparison.summary(self.flags))
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.profile is not None and self.state.global_step + 1 == self.replay.first:
            self.profile.start()
        return super().training_step(*args, **kwargs)

    def report_step(self, metrics: Mapping[str, float]) -> None:
        """Print the requested steps with their recorded figures."""
        step = self.state.global_step
        if step < self.replay.first:
            return
        if self.profile is not None and step == self.replay.last:
            with on_all_ranks("the profile"):
                line = self.profile.stop()
        self.console.step(step, self.state.max_steps, metrics)
        self.console.say(self.comparison.line(step, self.learner.figures))
        if self.profile is not None and step == self.replay.last:
            self.console.say(line)

    # -- the start

    def make_checkpointer(self) -> Checkpointer:
        return ReplayCheckpoints(self, self.replay)

    def _open_records(self, checkpoint: str | None, resumes: bool) -> None:
        start = step_of(checkpoint) if checkpoint else 0
        with on_all_ranks("the journal"):
            self.rounds.check_recorded(start, self.args)
        self.console.say(self.replay.plan(start))


class ReplayCheckpoints(Checkpointer):
    """The checkpoints of the replayed run. All ranks read them, and none writes."""

    def __init__(self, trainer: GRPOTrainer, replay: Replay) -> None:
        super().__init__(trainer)
        self.replay = replay

    def _resolve_folders(self) -> bool:
        return False

    def find(self, wanted: str | bool | None) -> str | None:
        """Find the last undamaged checkpoint before the first step to replay; None: start from the model."""
        for start in gather(self.replay.starts())[0]:
            if not start:
                break
            folder, console = str(self.replay.run / f"checkpoint-{start}"), self.trainer.console
            if (damage := find_damage(folder, self.args.layout, self.nodes_are_apart, console)) is None:
                return folder
            console.warn(f"checkpoints: {folder} is damaged and isn't taken: {damage}")
        return None


def _check_end(replay: Replay, args: GRPOConfig) -> None:
    if 0 < args.max_steps < replay.last:
        raise ValueError(
            f"the last step is {replay.last}, but max_steps is {args.max_steps}: name steps of the run, or leave "
            "max_steps as it was."
        )


def _unasked(functions: Sequence[Any], names: Sequence[str]) -> list[Unasked]:
    """Make as many placeholders as the recipe has reward functions; environments add their own rewards later."""
    return [Unasked(name) for name in [*names, *("reward" for _ in functions)][: len(functions)]]


class _EndAfter(TrainerCallback):
    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.last

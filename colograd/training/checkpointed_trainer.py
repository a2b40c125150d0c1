"""`transformers.Trainer` whose hooks for checkpoints ask a `Checkpointer`."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from ..checkpoint import folders, search
from ..checkpoint.reading import loading, trainer_state
from ..data import PromptDataset, PromptStream
from ..parallel.ranks import gather, on_all_ranks
from ..policy.loading import Policy
from ..reporting.console import Console
from ..reporting.metrics import PhaseTimes
from ..rollout.journal import Journal
from ..sharding import Sharding
from .checkpointer import Checkpointer
from .journaling import begin_records, end_records, keep_recipe, open_journal


class NotSaved(Exception):
    """No checkpoint was saved, so that callbacks' ``on_save`` isn't called."""


class CheckpointedTrainer(Trainer):
    """Stops with a whole checkpoint, and resumes from one."""

    console: Console
    facts: dict[str, Any]  # for the model card and the journal: recipe, command, dataset
    policy: Policy
    times: PhaseTimes
    sharding: Sharding
    train_prompts: PromptDataset | PromptStream
    journal: Journal | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpointer = self.make_checkpointer()
        self.add_callback(self.checkpointer)

    def make_checkpointer(self) -> Checkpointer:
        """Overridden where checkpoints are read from another run's folder. A collective."""
        return Checkpointer(self)

    def at_boundary(self) -> bool:
        """Whether a checkpoint written now could be resumed from."""
        return True

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in transformers; ``"auto"`` resumes where there is a complete checkpoint. SIGTERM writes one and ends.

        A run that had reached its last step is loaded and not trained further.
        """
        checkpoint = self.checkpointer.find(resume_from_checkpoint)
        if checkpoint is not None and (finished := self._finished(checkpoint)) is not None:
            return finished
        self.checkpointer.begin(checkpoint)
        self._open_journal(checkpoint, resume_from_checkpoint)
        with self.checkpointer.during_training():
            output = super().train(checkpoint, *args, **kwargs)
        self._end_records()
        return output

    def _finished(self, checkpoint: str) -> TrainOutput | None:
        """Load the checkpoint of a run's last step, so that it can be saved again; None: there are steps to train.

        transformers would train one more step.
        """
        state = trainer_state(checkpoint)
        *_, max_steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        if state.global_step < max_steps:
            return None
        self._load_from_checkpoint(checkpoint)
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self.optimizer: Any = self.accelerator.prepare(self.optimizer)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_rng_state(checkpoint)
        self.state = state
        self.console.say(f"{os.path.relpath(checkpoint)} is at the last of {max_steps} steps: nothing is left to train")
        return TrainOutput(state.global_step, 0.0, {})

    # -- the rollout log

    def _open_journal(self, checkpoint: str | None, wanted: str | bool | None) -> None:
        line, problem, resumes = "", "", search.is_wanted(wanted)
        with on_all_ranks("the journal"):
            if self.journal is not None:
                step = folders.step_of(checkpoint) if checkpoint else 0
                line = open_journal(self.journal, resumes, step, self.args.should_save)
                problem = keep_recipe(self.journal, self.facts.get("settings")) if self.args.should_save else ""
        if line:
            self.console.say(line)
        self.console.warn_of_all(gather(problem))

    def begin_records(self, evaluation: str = "") -> None:
        """Open the journal of the round, or of an evaluation in between, and read what it has of it. A collective."""
        if not self.args.keeps_journal or not self.is_in_train:
            return
        with on_all_ranks("the journal"), self.times.phase("journal"):
            problem = begin_records(self.journal, self.state.global_step, self.model, evaluation)
        self.console.warn_of_all(gather(problem))

    def _end_records(self) -> None:
        """Of the last round, after which no other one would tell what went wrong with its records."""
        if self.args.keeps_journal:
            self.console.warn_of_all(gather(end_records(self.journal)))

    # -- transformers' hooks

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except NotSaved:
            self.control.should_save = False

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if not self.checkpointer.save():
            raise NotSaved

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with self.checkpointer.saving_model():
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.checkpointer.save_optimizer(
            output_dir, functools.partial(super()._save_optimizer_and_scheduler, output_dir)
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        usual = functools.partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self.checkpointer.load_weights(resume_from_checkpoint, usual)

    def _load_best_model(self) -> None:
        self.checkpointer.load_weights(str(self.state.best_model_checkpoint), super()._load_best_model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """A parameter that isn't in the files is an error, and not a line in a log."""
        self.checkpointer.check_all_loaded(load_result.missing_keys)
        super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.checkpointer.load_optimizer(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with loading(str(checkpoint), "the random state"):
            super()._load_rng_state(checkpoint)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As in transformers; the ranks then share out its state."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            self.sharding.share(optimizer)
        return optimizer

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which deletes checkpoints and loads the best one: all must have been written."""
        self.checkpointer.settle(wait=True)
        return super()._finalize_training(*args, **kwargs)

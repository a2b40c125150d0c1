"""`transformers.Trainer` with checkpoints that are whole or not there, exact resuming, and a clean end on SIGTERM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import TrainOutput

from ..data import PromptStream
from ..parallel.ranks import gather, on_all_ranks, rank, world_size
from ..policy import quantized
from ..policy.images import load_weights
from ..sharding.weight_files import load_mixture, stacked_masters
from . import checkpoints, manifest, reading
from .adamw_split import AdamWSplit, adopt_masters, join_remainders
from .journaling import begin_records, end_records, keep_recipe, open_journal
from .node_folders import nodes_are_apart
from .saving_trainer import SavingTrainer


class ResumableTrainer(SavingTrainer):
    """Stops with a whole checkpoint and goes on from one. A subclass says when a checkpoint could be resumed from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nodes_are_apart = self._settle_folders()
        self.add_callback(_StopAndSave(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in transformers; ``"auto"`` resumes where there is a complete checkpoint. SIGTERM writes one and ends.

        A run that had reached its last step is loaded and not trained further.
        """
        with on_all_ranks("the search for a checkpoint"):
            if self.args.should_save:  # first, for it brings back what was about to be replaced
                checkpoints.sweep(self.args.output_dir)
        found = self._found(resume_from_checkpoint)
        self._save_is_due, self._failures = False, 0
        if found is not None and (finished := self._finished(found)) is not None:
            return finished
        if found is not None:
            self.console.say(f"resumed from {os.path.relpath(found)}: step {checkpoints.step_of(found) + 1} is next")
        self._expect_prompts(found)
        self._open_journal(found, resume_from_checkpoint)
        if self.nodes_are_apart:
            self.console.say(
                f"checkpoints: the {self.args.layout.nodes} nodes share no file system, so each writes whole ones into "
                f"its own {self.args.output_dir}, and goes on from the last that all of them have"
            )
        self.stop_signal.install()
        try:
            output = super().train(found, *args, **kwargs)
            self.settle(wait=True)
            self._end_records()
            return output
        finally:
            self._finish_alone()  # of a run that ends by an error
            self.stop_signal.remove()

    def _found(self, wanted: str | bool | None) -> str | None:
        """The checkpoint to go on from; where nodes share no file system, the last one that each of them has.

        A damaged one is passed over in a search, with a line, and an error where it was named.
        """
        layout, run_dir = self.args.layout, str(self.args.output_dir)
        with on_all_ranks("the search for a checkpoint"):
            steps = checkpoints.complete_steps(run_dir)
        of_ranks = gather(steps)
        of_nodes = of_ranks[:: layout.ranks_per_node] if self.nodes_are_apart else of_ranks[:1]
        self._refused.clear()
        while True:
            with on_all_ranks("the search for a checkpoint"):
                found = checkpoints.find_resume(wanted, run_dir, of_nodes, self._refused)
            # A shared file system may show ranks different folders: rank 0 has looked for all.
            found = found if self.nodes_are_apart else gather(found)[0]
            damage = None if found is None else self._damage(found)
            if damage is None:
                return found
            if not checkpoints.is_search(wanted):
                raise ValueError(f"resume_from_checkpoint is {found!r}, which is damaged: {damage}. Name another one.")
            self.console.warn(f"checkpoints: {os.path.relpath(str(found))} is damaged and isn't taken: {damage}")
            self._refused.add(checkpoints.step_of(str(found)))

    def _damage(self, checkpoint: str) -> str | None:
        """What is wrong with a checkpoint, on whichever rank; None: nothing. A collective: the ranks share the work."""
        folder, damage, files = Path(checkpoint), None, None
        layout = self.args.layout
        try:
            files = manifest.read(folder)
            if files is not None:
                mine = manifest.shares(files, rank(), world_size(), layout.ranks_per_node, self.nodes_are_apart)
                manifest.check(folder, files, mine)
            reading.look(folder)
        except (ValueError, OSError) as error:
            damage = str(error)
        of_ranks = gather((damage, files is None))
        found = next(((number, text) for number, (text, _) in enumerate(of_ranks) if text), None)
        if found is None:
            if of_ranks[0][1]:
                self.console.say(
                    f"checkpoints: {os.path.relpath(checkpoint)} has no {manifest.MANIFEST} (an older version wrote "
                    "it): it is taken unchecked"
                )
            return None
        where = f" (rank {found[0]} found it)" if world_size() > 1 else ""
        return found[1] + where

    def _settle_folders(self) -> bool:
        """Whether each node writes and reads checkpoints of its own, because nodes share no file system.

        Each then has whole ones: its ranks' parts, and what is the same for all.
        """
        args = self.args
        apart = nodes_are_apart(args.output_dir, args.layout)
        if args.save_on_each_node and args.layout.nodes > 1 and not apart:
            raise ValueError(
                f"save_on_each_node is true, but all nodes share the folder {args.output_dir!r} and would write the "
                "same files: set it to false, or give an output_dir that is local on each node."
            )
        args.save_on_each_node |= apart
        return apart

    def _expect_prompts(self, checkpoint: str | None) -> None:
        """Have a streamed dataset check that it is read again as before the checkpoint."""
        prompts = self.train_prompts
        if not isinstance(prompts, PromptStream):
            return
        skipped = checkpoint is not None and not self.args.ignore_data_skip
        with on_all_ranks("the checkpoint's prompts"):
            prompts.expect(checkpoints.read_prompts(str(checkpoint)) if skipped else {})

    def _open_journal(self, checkpoint: str | None, wanted: str | bool | None) -> None:
        line, problem, resumes = "", "", checkpoints.is_wanted(wanted)
        with on_all_ranks("the journal"):
            if self.journal is not None:
                step = checkpoints.step_of(checkpoint) if checkpoint else 0
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

    def _finished(self, checkpoint: str) -> TrainOutput | None:
        """Load a checkpoint at which nothing is left to do (transformers would take a step more), with its optimizer,
        so that it can be saved again or gone on from; None if there is something to do."""
        state = reading.trainer_state(checkpoint)
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

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As in transformers; the ranks then share its state out as the way of sharding says."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            self.sharding.share(optimizer)
        return optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """As in transformers; of a policy that is cut, each rank reads its part."""
        with on_all_ranks("loading the weights"), reading.reading(resume_from_checkpoint, "the model"):
            if self.policy.adapter is not None:
                quantized.check_fits(self.policy.quantization, resume_from_checkpoint)
            if not self._read_weights(Path(resume_from_checkpoint)):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Likewise."""
        best = str(self.state.best_model_checkpoint)
        with on_all_ranks("loading the best model"), reading.reading(best, "the model"):
            if not self._read_weights(Path(best)):
                super()._load_best_model()

    def _read_weights(self, folder: Path) -> bool:
        """Read what transformers' Trainer doesn't: of a policy that is cut or reads images, or of a mixture."""
        if self.sharding.load_weights(folder):
            return True
        if self.policy.adapter is None and self.policy.processor is not None:
            load_weights(self.model, str(folder))
            return True
        return self.policy.adapter is None and load_mixture(self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As in transformers; from any number of ranks and any way of sharding. A float32 checkpoint goes on with split
        masters, bit for bit, and the reverse."""
        if checkpoint is None:
            return
        optimizer = self._plain_optimizer
        with on_all_ranks("loading the optimizer"), reading.reading(checkpoint, "the optimizer's state"):
            if not self.sharding.load_optimizer(optimizer, Path(checkpoint)):
                # Through the CPU: transformers reads it on the device, which on several ranks of a CPU torch refuses.
                optimizer.load_state_dict(_read(checkpoint, OPTIMIZER_NAME))
            self.lr_scheduler.load_state_dict(_read(checkpoint, SCHEDULER_NAME))
            join_remainders(optimizer)
            if isinstance(optimizer, AdamWSplit):
                owned = self.sharding.owned()
                adopt_masters(optimizer, owned, checkpoints.float32_weights(checkpoint))
                if self.policy.adapter is None:
                    names = dict.fromkeys(piece.name for piece in owned)
                    adopt_masters(optimizer, owned, stacked_masters(names, Path(checkpoint)))
        self.sharding.gather_weights()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As in transformers."""
        with on_all_ranks("loading the random state"), reading.reading(str(checkpoint), "the random state"):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As in transformers; but a parameter that isn't in the files is an error, and not a line in a log."""
        state = self.model.state_dict()
        missing = set(load_result.missing_keys) - set(self.model._keys_to_ignore_on_save or ())
        there = {state[name].data_ptr() for name in state.keys() - missing}  # of a tied one under its other name
        if lacking := sorted(name for name in missing & state.keys() if state[name].data_ptr() not in there):
            raise ValueError(
                f"The checkpoint's weights lack {len(lacking)} of the policy's ({', '.join(lacking[:3])}): they are of "
                "another model, or a file is missing."
            )
        super()._issue_warnings_after_load(load_result)


def _read(checkpoint: str, name: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(os.path.join(checkpoint, name), map_location="cpu", weights_only=True)
    return state


class _StopAndSave(TrainerCallback):
    """Puts saves off to the next boundary, and turns SIGTERM on any rank into a save and a stop on all."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        stops, saves = zip(*gather((trainer.stop_signal.received, trainer.saves.state())), strict=True)
        trainer.settle(wait=False, states=saves)
        stop = any(stops)
        due = trainer._save_is_due or control.should_save or stop
        control.should_save = due and trainer.at_boundary()
        trainer._save_is_due = due and not control.should_save
        if stop and control.should_save:
            trainer.console.warn(f"SIGTERM: a checkpoint of step {state.global_step} is written, then the run ends.")
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer._save_is_due:  # a callback ended the run: the rest of the round never came
            self.trainer.console.warn(
                f"checkpoints: the run was stopped at step {state.global_step}, in the middle of a round, where none "
                "can be resumed from: save_model() saves its weights."
            )

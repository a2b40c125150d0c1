"""The training loop. A round of prompts, and the optimizer steps that are made of it:

    for batch in prompts:                        this rank's prompts of one round
        weights.publish(step)                    the engine samples with the policy's present weights
        groups = sampler.collect(batch)          generate, score, compute advantages
        for work in learner.schedule(groups):    pack the groups into optimizer steps
            metrics = learner.train(work)        forward, backward, one sum of gradients; clip, optimizer, learning rate
            recorder.step(metrics)               console, run record, figures of the step
            checkpointer.maybe_save()            after logs and an evaluation, where they are due

`transformers.Trainer.train` calls this loop in the place of its own, which is made for batches that exist before a step
begins. Callbacks get the same events in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import skip_first_batches
from transformers.optimization import GreedyLR
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import SaveStrategy, TrainOutput

from .batch import Prompt

# Their `step` takes the metric that an evaluation found: `Trainer._evaluate` calls it.
DRIVEN_BY_METRICS = (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)


class Loop:
    """One training of a `GRPOTrainer`.

    Args:
        trainer: the GRPOTrainer, whose parts do the work: `weights`, `sampler`, `learner`, `recorder`, `checkpointer`.
        checkpoint: the folder to resume from; None: start from the model.
        ignore_keys: as in `transformers.Trainer.train`, for evaluations.
    """

    def __init__(self, trainer: Any, checkpoint: str | None, ignore_keys: list[str] | None) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.checkpoint, self.ignore_keys = checkpoint, ignore_keys
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None

    def run(self) -> TrainOutput:
        """Train from the checkpoint to the last step, or until a callback stops the training."""
        trainer = self.trainer
        self._prepare()
        self._tell("on_train_begin")
        if self.args.eval_on_start:
            trainer._evaluate(None, self.ignore_keys, skip_scheduler=True)
        trainer.measure_budget()
        for epoch in range(self.first_epoch, self.epochs):
            self._tell("on_epoch_begin")
            if self.checkpoint is not None and epoch == self.first_epoch:
                trainer._load_rng_state(self.checkpoint)
            self._run_epoch(epoch)
            self._tell("on_epoch_end")
            self._log_evaluate_save()
            if trainer.control.should_training_stop:
                break
        return trainer._finalize_training(None, self.samples, self.started)

    def _run_epoch(self, epoch: int) -> None:
        trainer = self.trainer
        sampler, learner, times = trainer.sampler, trainer.learner, trainer.times
        for batch in self._rounds(epoch):
            trainer.publish()
            groups = sampler.collect(batch)
            for work in learner.schedule(groups):
                self._tell("on_step_begin")
                # `learner.train(work)`, in a method that a subclass may wrap.
                trainer._tr_loss += trainer.training_step(trainer.model, work)
                self._update(epoch)
                trainer.report_step(learner.finish_step())
                self._log_evaluate_save()
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    return
                times.begin_step()

    def _rounds(self, epoch: int) -> Iterator[list[list[Prompt]]]:
        """This rank's prompts of each round of an epoch, a list per optimizer step, without the rounds that the
        checkpoint has trained."""
        args, trained = self.args, self.steps_trained if epoch == self.first_epoch else 0
        self.step_of_epoch = trained
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        steps = iter(skip_first_batches(self.loader, trained) if trained else self.loader)
        for _ in range((self.steps_per_epoch - trained) // args.round_length):
            self.trainer.times.begin_step()  # before reading prompts, which may tokenise a stream
            round_ = [next(steps) for _ in range(args.round_length)]
            yield round_[: args.steps_per_generation]  # the loader gives them `num_iterations` times

    def _update(self, epoch: int) -> None:
        """Clip the gradient, let the optimizer change the weights, and count the step."""
        trainer, state = self.trainer, self.trainer.state
        self.grad_norm = trainer.learner.clip()
        self._tell("on_pre_optimizer_step")
        with trainer.times.phase("optimizer"):
            trainer.optimizer.step()
        self._tell("on_optimizer_step")
        self.learning_rate = trainer._get_learning_rate()
        if not isinstance(trainer.lr_scheduler, DRIVEN_BY_METRICS):
            trainer.lr_scheduler.step()
        trainer.model.zero_grad()
        state.global_step += 1
        self.step_of_epoch += 1
        state.epoch = epoch + self.step_of_epoch / self.steps_per_epoch
        self._tell("on_step_end")

    # -- callbacks

    def _tell(self, event: str) -> None:
        """Call the callbacks' method for an event. They set flags in ``trainer.control``."""
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _log_evaluate_save(self) -> None:
        """Log, evaluate and save, if callbacks have set the flags."""
        trainer, control = self.trainer, self.trainer.control
        if control.should_log and trainer.state.global_step > trainer._globalstep_last_logged:
            self._log()
        if control.should_evaluate:
            metrics = trainer._evaluate(None, self.ignore_keys)
            is_best = trainer._determine_best_metric(metrics=metrics, trial=None)
            if self.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            if trainer.checkpointer.save():
                self._tell("on_save")
            trainer.control.should_save = False

    def _log(self) -> None:
        """Log the mean loss since the last log; `GRPOTrainer.log` adds the other metrics."""
        trainer = self.trainer
        step, losses = trainer.state.global_step, trainer._tr_loss
        total = nested_gather(losses, self.args.parallel_mode).mean().item()
        losses.zero_()
        logs = {"loss": total / (step - trainer._globalstep_last_logged)}
        trainer._total_loss_scalar += total
        trainer._globalstep_last_logged = step
        if self.grad_norm is not None:
            logs["grad_norm"] = self.grad_norm
        logs["learning_rate"] = trainer._get_learning_rate() if self.learning_rate is None else self.learning_rate
        trainer.store_flos()
        trainer.log(logs, self.started)

    # -- the start

    def _prepare(self) -> None:
        """Count steps and epochs, make the optimizer and the schedule, load the checkpoint's.

        Names with an underscore are transformers' own state, which its other methods read.
        """
        trainer, args = self.trainer, self.args
        trainer.accelerator.free_memory()
        loader = trainer.get_train_dataloader()
        self.epochs, per_epoch, _, self.samples, _, self.steps_per_epoch, max_steps = (
            trainer.set_initial_training_values(args, loader)
        )
        self.first_epoch, self.steps_trained = trainer._init_training_state(
            max_steps, per_epoch, self.epochs, self.checkpoint, None
        )
        _, self.loader = trainer._prepare_for_training(max_steps, loader, self.checkpoint)
        self.started = time.time()
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._tr_loss = torch.tensor(0.0, device=args.device)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = trainer.state.global_step
        trainer.model.zero_grad()

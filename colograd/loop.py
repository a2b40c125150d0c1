"""The training loop. A round is the prompts that are sampled together. `Loop._run_epoch` in outline:

    for prompts in rounds:                         this rank's, a list per optimizer step
        publish()                                  the engine samples with the policy's present weights
        sampled = sampler.collect(prompts)         scored groups of each step: generate, score, compute advantages
        for step in learner.schedule(sampled):     packed rows, log-probabilities of the reference; num_iterations times
            learner.train(step)                    forward and backward of all its rows; one sum of gradients over ranks
            update()                               clip the gradient; optimizer, learning rate
            report_step(learner.finish_step())     the step's metrics: console, journal, report, the next log
            log_evaluate_save()                    if they are due

Every rank runs it. If several ranks share an engine, the first of these gets the groups, and `collect` returns empty
steps to the others. `schedule` fills them with a part of the first rank's groups.

`transformers.Trainer.train` calls it instead of its own loop, which needs batches that exist before a step begins.
Callbacks get the same events in the same order. A round is sampled before its first step begins.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate import skip_first_batches
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import SaveStrategy, TrainOutput

from .batch import Prompt
from .training.transformers_seam import DRIVEN_BY_METRICS


class Loop:
    """One training of a `GRPOTrainer`.

    Args:
        trainer: the GRPOTrainer. Its parts do the work: `sampler`, `learner`, `recorder`, `checkpointer`. Its names
            with an underscore are transformers' own state, which transformers' other methods read.
        checkpoint: the folder to resume from; None: start from the model.
        ignore_keys: as in `transformers.Trainer.train`, for evaluations.
    """

    def __init__(self, trainer: Any, checkpoint: str | None, ignore_keys: list[str] | None) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.checkpoint, self.ignore_keys = checkpoint, ignore_keys
        self.step_of_epoch = 0  # trained optimizer steps of the present epoch
        self.grad_norm = 0.0  # gradient norm of the last step, before clipping
        self.learning_rate = 0.0  # learning rate of the last step

    def run(self) -> TrainOutput:
        """Train from the checkpoint, or the model, to the last step, or until a callback stops the training."""
        trainer = self.trainer
        self._prepare()
        self._tell("on_train_begin")
        trainer.measure_budget()  # tokens per micro-batch; here, because it needs the optimizer
        if self.args.eval_on_start:
            trainer._evaluate(None, self.ignore_keys, skip_scheduler=True)
        for epoch in range(self.first_epoch, self.epochs):
            self._tell("on_epoch_begin")
            if self.checkpoint is not None and epoch == self.first_epoch:
                trainer._load_rng_state(self.checkpoint)  # last, so that nothing draws from it before
            self._run_epoch(epoch)
            self._tell("on_epoch_end")
            self._log_evaluate_save()
            if trainer.control.should_training_stop:
                break
        return trainer._finalize_training(None, self.samples, self.started)

    def _prepare(self) -> None:
        trainer, args = self.trainer, self.args
        trainer.accelerator.free_memory()
        loader = trainer.get_train_dataloader()
        self.epochs, self.steps_per_epoch, _, self.samples, _, _, max_steps = trainer.set_initial_training_values(
            args, loader
        )
        self.first_epoch, self.steps_trained = trainer._init_training_state(
            max_steps, self.steps_per_epoch, self.epochs, self.checkpoint, None
        )
        # The model is the trainer's own: nothing wraps it.
        _, self.loader = trainer._prepare_for_training(max_steps, loader, self.checkpoint)
        self.started = time.time()
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._tr_loss = torch.tensor(0.0, device=args.device)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = trainer.state.global_step
        trainer.model.zero_grad()

    def _run_epoch(self, epoch: int) -> None:
        """Train the rounds of an epoch, from the first one that the checkpoint hasn't trained.

        An epoch consists of whole rounds (`StepOrder` in data/order.py). As in TRL it counts optimizer steps, so the
        loader yields a round's prompts `num_iterations` times.
        """
        trainer, learner, times = self.trainer, self.trainer.learner, self.trainer.times
        length = self.args.round_length  # optimizer steps: steps_per_generation x num_iterations
        self.step_of_epoch = trained = self.steps_trained if epoch == self.first_epoch else 0
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        prompts_of_steps = iter(skip_first_batches(self.loader, trained) if trained else self.loader)
        times.begin_step()
        for _ in range((self.steps_per_epoch - trained) // length):
            # This rank's prompts of a round, a list per optimizer step. `Learner.schedule` repeats these itself.
            prompts: list[list[Prompt]] = [next(prompts_of_steps) for _ in range(length)]
            trainer.publish()
            sampled = trainer.sampler.collect(prompts[: self.args.steps_per_generation])
            for step in learner.schedule(sampled):
                self._tell("on_step_begin")
                # `Learner.train(step)`, under transformers' name, which subclasses may wrap.
                trainer._tr_loss += trainer.training_step(trainer.model, step)
                self._update(epoch)
                trainer.report_step(learner.finish_step())
                self._log_evaluate_save()
                times.begin_step()  # `finish_step` ended the last one: logging, evaluating, saving are no step's time
                # At `max_steps`, or if a callback requests it. The round's other steps are dropped then. A due
                # checkpoint is refused with a line, because a run can't resume in the middle of a round.
                if trainer.control.should_training_stop:
                    return
            if trainer.control.should_epoch_stop:
                return

    def _update(self, epoch: int) -> None:
        """Clip the gradient's norm, let the optimizer change the weights, and count the step."""
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
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _log_evaluate_save(self) -> None:
        trainer, control = self.trainer, self.trainer.control
        if control.should_log and trainer.state.global_step > trainer._globalstep_last_logged:
            self._log()
        if control.should_evaluate:  # `_evaluate` publishes the weights first
            metrics = trainer._evaluate(None, self.ignore_keys)
            is_best = trainer._determine_best_metric(metrics=metrics, trial=None)
            if self.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            if trainer.checkpointer.save():  # else it failed with a warning, or will be due again at the round's end
                self._tell("on_save")
            trainer.control.should_save = False

    def _log(self) -> None:
        trainer = self.trainer
        step, losses = trainer.state.global_step, trainer._tr_loss
        # Each rank has the loss over all ranks, unless a subclass's `training_step` returned another one.
        total = nested_gather(losses, self.args.parallel_mode).mean().item()
        losses.zero_()
        mean = total / (step - trainer._globalstep_last_logged)
        trainer._total_loss_scalar += total
        trainer._globalstep_last_logged = step
        trainer.log({"loss": mean, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}, self.started)

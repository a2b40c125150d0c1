"""The training loop of every rank, instead of transformers' loop.

A round is one generation and the optimizer steps until the next generation.

If several ranks share a vLLM engine, `Sampler.collect` returns all groups on the engine's first rank, and empty steps
on the other ranks. `Learner.schedule` then divides the groups among these ranks.

Callbacks get transformers' events in the usual order.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from accelerate import skip_first_batches
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import TrainOutput

from .batch import Prompt
from .runtime.registry import hooks
from .training.transformers_seam import DRIVEN_BY_METRICS


class Loop:
    """The training loop of one call of `GRPOTrainer.train`.

    The loop sets private attributes of the trainer (``_...``), because methods of `transformers.Trainer` read them."""

    def __init__(self, trainer: Any, checkpoint: str | None, ignore_keys: list[str] | None) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.checkpoint, self.ignore_keys = checkpoint, ignore_keys
        self.step_of_epoch = 0
        self.grad_norm = 0.0  # Gradient norm of the last optimizer step, before clipping.
        self.learning_rate = 0.0

    def run(self) -> TrainOutput:
        """Train until the last step, or until a callback stops the training. An epoch consists of whole rounds."""
        trainer, learner, times, args = self.trainer, self.trainer.learner, self.trainer.times, self.args
        length = args.round_length
        self._prepare()
        self._tell("on_train_begin")
        learner.measure_budget()  # The token budget is measured after `_prepare`, which makes the optimizer.
        if args.eval_on_start:
            self._evaluate(at_start=True)
        for epoch in range(self.first_epoch, self.epochs):
            self._tell("on_epoch_begin")
            if self.checkpoint is not None and epoch == self.first_epoch:
                trainer._load_rng_state(self.checkpoint)  # Load the random state after `_prepare`, which changes it.
            self.step_of_epoch = trained = self.steps_trained if epoch == self.first_epoch else 0
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            prompts_of_steps = iter(skip_first_batches(self.loader, trained) if trained else self.loader)
            times.begin_step()
            for _ in range((self.steps_per_epoch - trained) // length):
                # This rank's prompts of a round, one list per optimizer step. As in TRL the lists come
                # `num_iterations` times. `Learner.schedule` repeats the steps, so the first lists suffice.
                prompts: list[list[Prompt]] = [next(prompts_of_steps) for _ in range(length)]
                trainer.publish()
                sampled = trainer.sampler.collect(prompts[: args.steps_per_generation])
                for step in learner.schedule(sampled):
                    self._tell("on_step_begin")
                    # `training_step` runs `Learner.train`. A subclass may wrap this method of transformers.
                    trainer._tr_loss += trainer.training_step(trainer.model, step)
                    self._update(epoch)
                    trainer.report_step(learner.finish_step())
                    self._log_evaluate_save()
                    times.begin_step()  # A step's times exclude logging, evaluating and saving.
                    if trainer.control.should_training_stop:
                        break
                if trainer.control.should_training_stop or trainer.control.should_epoch_stop:
                    break
            self._tell("on_epoch_end")
            self._log_evaluate_save()
            if trainer.control.should_training_stop:
                break
        trainer.checkpointer.settle(wait=True)  # Wait for saves: `_finalize_training` reads and deletes checkpoints.
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
        _, self.loader = trainer._prepare_for_training(max_steps, loader, self.checkpoint)
        self.started = time.time()
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._tr_loss = torch.tensor(0.0, device=args.device)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = trainer.state.global_step
        trainer.model.zero_grad()

    def _update(self, epoch: int) -> None:
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

    def _tell(self, event: str) -> None:
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _log_evaluate_save(self) -> None:
        trainer, control, args = self.trainer, self.trainer.control, self.args
        step, losses = trainer.state.global_step, trainer._tr_loss
        if control.should_log and (steps := step - trainer._globalstep_last_logged) > 0:
            # The mean over ranks: a subclass's `training_step` may return a different loss on each rank.
            total = nested_gather(losses, args.parallel_mode).mean().item()
            losses.zero_()
            trainer._total_loss_scalar += total
            trainer._globalstep_last_logged = step
            logs = {"loss": total / steps, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
            trainer.log(logs, self.started)
        if control.should_evaluate:
            self._evaluate()
        if trainer.control.should_save:
            if trainer.checkpointer.save():
                self._tell("on_save")
            trainer.control.should_save = False

    def _evaluate(self, at_start: bool = False) -> None:
        metrics = self.trainer.evaluate(ignore_keys=self.ignore_keys)
        for act in hooks("evaluated"):
            act(self.trainer, metrics, at_start)

"""`GRPOTrainer`: a `transformers.Trainer` whose training loop, `loop.py`, works with four parts of the trainer:

    sampler        rollout/sampler.py        prompts -> scored groups
    learner        training/learner.py       scored groups -> gradient of each optimizer step
    checkpointer   training/checkpointer.py  checkpoints, resuming, SIGTERM
    recorder       extensions/recording/     data of the run's report

To change one stage of the training, override `generate`, `score`, `compute_advantages` or `compute_loss`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import TrainOutput

from .batch import FinishReason, Group, LossOutput, MicroBatch, Prompt, StepBatch
from .config import GRPOConfig
from .config.policy import KEEPS_MASTER
from .engine.arguments import compiles
from .loop import Loop
from .losses.advantages import AdvantageEstimator
from .losses.objective import Objective
from .parallel import faults, watchdog
from .parallel.faults import ends_together
from .parallel.ranks import gather
from .policy.logprobs import PolicyForward
from .rewards import weighted_sum
from .rollout.features import TrainerArguments
from .rollout.record_file import FIGURES, add_step
from .rollout.rounds import round_of
from .rollout.sampler import Sampler
from .runtime import process, registry
from .runtime.failures import closes_if_it_fails
from .sharding import strategy_of
from .training.adamw_split import accumulate_in_float32, optimizer_of
from .training.assembly import announce, assemble, choose_kernels, join_second_models, prove_rows, resolve_by_memory
from .training.checkpointer import end_at_a_signal
from .training.learner import Learner, packing_rules
from .training.preparation import PreparedRun, prepare, prepared_config, reader_of
from .training.recorded_settings import store_of
from .training.transformers_seam import SeamTrainer

STAGES = ("generate", "score", "compute_advantages", "compute_loss", "evaluate")

if TYPE_CHECKING:
    TrainerBase = SeamTrainer
else:  # The hook ``trainer_base`` adds base classes, for example one with TRL's attribute names.
    TrainerBase = type("TrainerBase", (*registry.hooks("trainer_base"), SeamTrainer), {"__module__": __name__})


class GRPOTrainer(TrainerBase):
    """Group Relative Policy Optimization with vLLM in the same process.

    Args:
        model: a Hub id, a folder, a language model of transformers, or a PeftModel around such a model.
        reward_funcs: one reward function or a list: names, import paths or callables (see `colograd.rewards`), or
            reward models (modules, folders or Hub ids).
        args: the configuration; docs/configuration.md has its fields.
        train_dataset: a `datasets.Dataset` with a column ``prompt``, plain or conversational. The reward functions get
            all other columns, unless `remove_unused_columns` is set. An `IterableDataset` is read during training. None
            is for environments that make all prompts. An `IterableDataset` or None needs ``max_steps``.
        eval_dataset: prompts for `evaluate`: a dataset like ``train_dataset``, names of benchmarks (``"gsm8k"``,
            ``["math500@4"]``), or a dict of such datasets or names (for example a DatasetDict).
        processing_class: the tokenizer, or a vision-language model's processor. None loads it.
        reward_processing_classes: the reward models' tokenizers, one per reward function. None loads each tokenizer.
        callbacks: as in `transformers.Trainer`.
        optimizers: an optimizer and a schedule, as in `transformers.Trainer`.
        quantization_config: a `transformers.BitsAndBytesConfig` for the frozen base of a LoRA adapter.
        peft_config: a `peft.LoraConfig`. If it is set, the adapter is trained instead of the whole model.
        tools: functions that the model may call while it generates (see docs/guide/tools.md).
        rollout_func: a function ``f(prompts, trainer) -> dict``, or a class, that makes completions in vLLM's place.
        environment_factory: a function that makes an environment (an object with tools as methods). Or a dict of such
            functions; its keys are values of the dataset's column ``environment``.
        agent: a function or command that runs once per completion and calls the model over HTTP (docs/guide/tools.md).

    Raises:
        ValueError: an argument or setting is wrong. All ranks raise the error, before anything is trained.
    """

    samples = True  # Whether a vLLM engine samples the groups. A subclass that reads recorded groups sets False.
    sampler_class: type[Sampler] = Sampler

    @closes_if_it_fails
    @ends_together("the start")
    @process.rank_variables()
    @process.collector_at_rest()
    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        agent: Any = None,
    ) -> None:
        started = process.command_began() or time.perf_counter()
        args = prepared_config(args, model)
        end_at_a_signal(args, self.closing)
        # A callback of the user's may add metrics to an evaluation in `on_evaluate`.
        kinds: list[Any] = [each if isinstance(each, type) else type(each) for each in callbacks or ()]
        adds_metrics = any(kind.on_evaluate.__module__.partition(".")[0] != "transformers" for kind in kinds)
        given = TrainerArguments(
            model, reward_funcs, reward_processing_classes, train_dataset, eval_dataset, processing_class,
            quantization_config, peft_config, optimizers[0],
            {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory, "agent": agent},
            samples=self.samples,
            replaced=self.replaced,
            adds_metrics=adds_metrics or bool(self.replaced & {"evaluate", "compute_loss"}),
        )  # fmt: skip
        task = prepare(given, args, self.closing)
        self.policy, self.rewards, self.feature = task.policy, task.scorer.rewards, task.feature
        self.train_prompts, self.eval_prompts = task.train_prompts, task.eval_prompts
        super().__init__(
            model=task.policy.model,
            args=args,
            data_collator=list,
            train_dataset=task.train_prompts,
            eval_dataset=task.eval_prompts,
            processing_class=task.policy.processor or task.policy.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_of(args, task.policy.model) if optimizers[0] is None else None,
        )
        # Callbacks expect the datasets that the user passed.
        self.train_dataset = task.train_prompts.dataset if train_dataset is None else train_dataset
        self.eval_dataset: Any = eval_dataset
        self._tokenised = (self.train_dataset, eval_dataset)
        self._build(task)
        self.console.say(f"ready in {time.perf_counter() - started:.0f} s")

    def _build(self, task: PreparedRun) -> None:
        args: GRPOConfig = self.args
        self.closing.callback(self.checkpointer.stop_signal.remove)
        self.closing.callback(self.checkpointer.finish_alone)
        if args.optim in KEEPS_MASTER and self.optimizer is None:
            accumulate_in_float32(self.model.parameters())
        self.estimator = AdvantageEstimator.of(args, [reward.weight for reward in self.rewards])
        self.journal = store_of(args, self.rewards, self.feature, reader_of(task.policy))
        if self.journal is not None:
            self.closing.callback(self.journal.close)
        resolve_by_memory(args, task, self.samples)
        strategy = strategy_of(args)
        rules = packing_rules(args, task.policy, task.objective, equal_counts=strategy.meets_in_backward)
        if self.samples and compiles(args):
            self.console.say("engine: vLLM starts, compiles and captures graphs: 1 to 3 minutes, less the next time")
        parts = assemble(args, task, rules.max_tokens, self.samples, self.times, self.closing)
        self.engine, self.weights, self.device_turns = parts.engine, parts.weights, parts.device_turns
        self.memory_plan, others = parts.memory_plan, parts.second_models
        self.sharding = strategy.for_run(self.model, args)
        self.closing.callback(self._release)
        for context in registry.hooks("training_context"):
            self.closing.enter_context(context(self.model, args))
        join_second_models(self, others)
        self.learner = Learner(self, args, task.policy, task.objective, rules, self.sharding, others, self.events)
        self.add_callback(self.learner.entropy)
        self.round = round_of(self)
        self.sampler = self._make_sampler(task)
        self.sampler.round = self.round
        choose_kernels(self.learner, self.closing)
        prove_rows(self.learner, task.proof_prompts)
        self.policy = self.learner.policy
        announce(self, task)
        args.freeze()

    def _make_sampler(self, task: PreparedRun) -> Sampler:
        source: Any = self.feature.source(self.engine, self.policy, self.args, trainer=self) if self.samples else None
        return self.sampler_class(
            self, self.args, self.engine, source, self.device_turns, task.scorer, self.estimator, self.events
        )

    # -- Stages: a subclass of `GRPOTrainer` may override any of the next four methods.

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[Group]:
        """Sample a group of completions for each prompt. Yield the groups in the order in which they are finished."""
        return self.sampler.generate(prompts)

    def score(self, group: Group) -> torch.Tensor:
        """Compute one group's rewards [G, R], float32, one column per reward function. NaN: the function abstained."""
        return self.sampler.begin_scoring([group]).result()

    def compute_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        """Convert one group's rewards [G, R] to advantages: [G], or a flat tensor with one per completion token.

        Advantages are per token if an agent's turns are rewarded one by one. With `scale_rewards` batch or
        batch_centered, or `multi_objective_aggregation: normalize_then_sum`, the trainer later divides all advantages
        of an optimizer step by the standard deviation of the step's scores (`AdvantageEstimator.step_scores`)."""
        advantages = self.estimator.of_group(rewards)
        if (add := self.feature.add_advantages) is None:
            return advantages
        return add(advantages, group, self.estimator, {reward.name: reward.weight for reward in self.rewards})

    def compute_loss(self, model: torch.nn.Module, micro_batch: MicroBatch, **kwargs: Any) -> LossOutput:
        """Compute a micro-batch's metrics, and its loss as a sum over tokens. The trainer divides the step's gradients
        by a denominator, e.g. the step's number of tokens in the loss (`TokenLoss.denominator`)."""
        entropy_gradient = self.loss.entropy_bonus and micro_batch.step_constants.coefficient != 0
        forward = PolicyForward(model, self.args.temperature, entropy_gradient, self.learner.forward_steps)
        logprobs, entropy, values = forward(micro_batch)
        self.recorder.keep(micro_batch, logprobs)
        return self.loss(logprobs, entropy, micro_batch, values)

    @property
    def replaced(self) -> frozenset[str]:
        """Names of the methods in `STAGES` that a subclass overrides or that the user has assigned to this object."""
        own = {name: getattr(getattr(self, name), "__func__", None) for name in STAGES}
        return frozenset(name for name, function in own.items() if function is not getattr(GRPOTrainer, name))

    @property
    def loss(self) -> Objective:
        """The `Objective` that `compute_loss` calls."""
        return self.learner.objective

    @property
    def evaluating(self) -> bool:
        """Whether `generate` and `score` are running for `evaluate` or `predict`, not for training."""
        return self.sampler.evaluates

    def combine(self, rewards: torch.Tensor) -> torch.Tensor:
        """Sum rewards [G, R], weighted by the R functions' weights. Return [G]. NaN: all functions abstained."""
        return weighted_sum(rewards, self.estimator.weights)

    def decode(self, group: Group) -> list[str]:
        """Return the texts of a group's completions, [G], for rewards and logs. Special tokens are removed. If
        `generation_kwargs` has ``skip_special_tokens: false``, only a final end token is removed."""
        options: Any = self.args.generation_kwargs or {}
        tokenizer, ids = self.policy.tokenizer, [list(rollout.completion_ids) for rollout in group.rollouts]
        if not (skips := options.get("skip_special_tokens", True)):
            special = {*tokenizer.all_special_ids}
            ended = [rollout.finish_reason is FinishReason.STOP for rollout in group.rollouts]
            ids = [own[:-1] if end and own and own[-1] in special else own for own, end in zip(ids, ended, strict=True)]
        texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=skips)
        return texts

    @ends_together("training")
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train like `transformers.Trainer.train`. Ctrl-C or a signal in `stop_signals` saves a checkpoint if possible,
        and ends the training. Resuming from the run's last step trains nothing.

        Args:
            resume_from_checkpoint: a checkpoint's folder. ``"auto"`` or True: the run's last complete checkpoint. If
                there is none, ``"auto"`` starts from the model, and True raises an error. False: start from the model.
                None: use the setting `resume_from_checkpoint`.
        """
        watchdog.set_limit(self.args.rank_timeout)  # An earlier trainer may have set another `rank_timeout`.
        # A previous call of `train` may have failed in the middle of a step.
        self.learner.pending = []
        self.sharding.discard()
        self._unlogged = []
        self.round.forget()
        self.sampler.take_counts()
        if self.engine is not None:
            self.engine.invalidate()  # The engine may have weights of the same step number from an earlier `train`.
        with self.recorder.run():
            checkpoint, finished = self._begin_training(resume_from_checkpoint)
            if finished is not None:
                return finished
            output = None  # `output` stays None if a signal with a deadline ends the training within a round.
            with self.checkpointer.during_training():
                output = super().train(checkpoint, *args, **kwargs)
            if self.args.keeps_journal:
                self.console.warn_of_all(gather(self.journal.close() if self.journal else ""))
            return output or TrainOutput(self.state.global_step, 0.0, {})

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: str | None = None,
        trial: Any = None, ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:  # fmt: skip
        self.checkpoint_config.restore()
        return Loop(self, resume_from_checkpoint, ignore_keys_for_eval).run()

    def training_step(self, model: torch.nn.Module, inputs: StepBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a step's forward and backward. Return the loss of all ranks' micro-batches, a scalar tensor."""
        return torch.tensor(self.learner.train(inputs), device=self.args.device)

    def publish(self) -> None:
        """Give the vLLM engine the weights of the present step."""
        with self.times.phase("publish"):
            if self.engine is not None and self.engine.version != self.state.global_step:
                self.sharding.traffic.published += self.weights.publish(self.state.global_step)

    def report_step(self, metrics: Mapping[str, float]) -> None:
        self._unlogged.append(dict(metrics))
        if self.journal is not None and self.args.layout.is_main:
            step, figures = self.state.global_step, self.learner.figures
            self.journal.note_beside(lambda folder: add_step(folder / FIGURES, step, figures))
        self.console.step(self.state.global_step, self.state.max_steps, metrics)
        self.recorder.step(metrics)

    def close(self) -> None:
        """Free the vLLM engine and the trainer's memory, so that this process can make a new trainer."""
        self.closing.close()
        faults.leave()

    def _release(self) -> None:
        self.sharding.close()
        self.learner.second_models = {}
        del self.weights, self.sharding, self.learner.sharding

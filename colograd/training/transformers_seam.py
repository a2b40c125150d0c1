"""`SeamTrainer`, the base class of `GRPOTrainer`: it overrides methods of `transformers.Trainer`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from httpx import HTTPError
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.optimization import GreedyLR
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PredictionOutput, TrainOutput

from ..checkpoint import folders, search
from ..checkpoint.reading import loading, trainer_state
from ..checkpoint.writing import saving_model
from ..config import GRPOConfig
from ..data import PromptDataset, PromptLoader, StepOrder
from ..engine.sampling import LengthHistory
from ..memory.table import MemoryPlan
from ..parallel import watchdog
from ..parallel.faults import ends_together
from ..parallel.ranks import gather, on_all_ranks
from ..policy.loading import Policy
from ..reporting.console import Console
from ..reporting.events import Events, NoRecord
from ..reporting.metrics import PhaseTimes
from ..rewards import RewardFunction
from ..rollout.rounds import PlainRound
from ..rollout.store import RolloutStore, digest_of
from ..runtime.registry import hooks
from ..sharding import ShardingStrategy
from ..weights import state_dict_on_host
from .checkpointer import Checkpointer
from .evaluation import evaluate_prompts
from .learner import Learner
from .preparation import eval_prompts_of, train_prompts_of

# Values of a model's configuration that transformers' `Trainer` changes.
NAMES = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
# Learning rate schedules that need an evaluation's metric as argument of `step`.
DRIVEN_BY_METRICS = (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)


class CheckpointConfig:
    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        configs = filter(None, (model.config, getattr(model, "generation_config", None)))
        self._values = [(each, {name: vars(each)[name] for name in NAMES if name in vars(each)}) for each in configs]

    def restore(self) -> None:
        end = self._tokenizer.eos_token_id
        for config, values in self._values:
            for name in NAMES:
                value, token = values.get(name), getattr(self._tokenizer, name, None)
                stands_in = token is None or (name == "pad_token_id" and token == end)
                if not stands_in and token not in (value if isinstance(value, list) else [value]):
                    continue  # Keep the tokenizer's new special token: the saved model needs it.
                if name in values:
                    setattr(config, name, value)
                else:
                    vars(config).pop(name, None)


class SeamTrainer(Trainer):
    policy: Policy
    rewards: list[RewardFunction]
    learner: Learner
    round: PlainRound
    sharding: ShardingStrategy
    train_prompts: Any
    eval_prompts: Any
    engine: Any  # `engine`, `weights` and `device_turns` are None if nothing is sampled.
    weights: Any
    device_turns: Any
    memory_plan: MemoryPlan
    feature: Any
    _tokenised: tuple[Any, Any]  # The datasets that became `train_prompts` and `eval_prompts`.
    journal: RolloutStore | None = None

    def __init__(self, **kwargs: Any) -> None:
        self.checkpoint_config = CheckpointConfig(kwargs["model"], self.policy.tokenizer)
        super().__init__(**kwargs)
        self.checkpoint_config.restore()
        self.model_accepts_loss_kwargs = True  # With False transformers would scale the loss.
        # `accelerate` must not wrap the model in DDP: the sharding strategy sums gradients over ranks.
        self.accelerator.prepare_model = lambda model, **kwargs: model
        self.facts: dict[str, Any] = {}  # Recipe, command, dataset and settings, for the model card and rollout log.
        self.times = PhaseTimes(synchronize=self.args.device.type == "cuda")
        self.console = Console(self.is_world_process_zero(), bars=not self.args.disable_tqdm)
        self.lengths = LengthHistory()
        self._unlogged: list[dict[str, float]] = []  # One dict of metrics per step since the last log with a loss.
        self._gathered: dict[str, torch.Tensor] | None = None
        self.checkpointer = self.make_checkpointer()
        self.recorder: NoRecord = next(filter(None, (make(self) for make in hooks("recorder"))), None) or NoRecord()
        self.completion_log = next(filter(None, (make(self) for make in hooks("completion_log"))), None)
        self.events = Events(self.times, self.console, self.recorder, self.completion_log)
        for shown in (ProgressCallback, PrinterCallback):
            self.remove_callback(shown)
        for callback in (self.checkpointer, self.console, self.recorder):
            self.add_callback(callback)

    def make_checkpointer(self) -> Checkpointer:
        return Checkpointer(self)

    def _begin_training(self, wanted: str | bool | None) -> tuple[str | None, TrainOutput | None]:
        """Find the checkpoint to resume from. If no step is left to train, load the checkpoint here, because
        transformers would train one more step.

        Returns:
            The checkpoint or None, and the output of `train` (None: steps are left to train).
        """
        wanted = self.args.resume_from_checkpoint if wanted is None else wanted
        checkpoint = self.checkpointer.find(wanted)
        if checkpoint is not None:
            state = trainer_state(checkpoint)
            *_, max_steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
            if state.global_step >= max_steps:
                self._load_from_checkpoint(checkpoint)
                self.create_optimizer_and_scheduler(num_training_steps=max_steps)
                self.optimizer: Any = self.accelerator.prepare(self.optimizer)
                self._load_optimizer_and_scheduler(checkpoint)
                self._load_rng_state(checkpoint)
                self.state = state
                self.console.say(search.nothing_left(checkpoint, max_steps))
                return checkpoint, TrainOutput(state.global_step, 0.0, {})
        self.checkpointer.begin(checkpoint)
        self._open_records(checkpoint, search.is_wanted(wanted))
        for guard in hooks("guard_callbacks"):
            guard(self)
        return checkpoint, None

    @ends_together("the evaluation")
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample and score the evaluation prompts with the settings ``*_eval``, and compute the loss if `loss_eval`.

        Args:
            eval_dataset: the dataset to evaluate on, or the name of a dataset in the trainer's ``eval_dataset``. By
                default the trainer's ``eval_dataset``.

        Returns:
            Metrics: ``<prefix>_reward``, ``<prefix>_pass@1`` (and 2, 4 ...), ``<prefix>_rewards/<name>/mean``,
            ``<prefix>_completions/...`` and more. With a dict of datasets, a dataset's prefix is ``<prefix>_<name>``.
        """
        metrics = self._evaluated(eval_dataset, metric_key_prefix)
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @ends_together("the evaluation")
    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """Evaluate like `evaluate`, without logging. `predictions` and `label_ids` of the result are None."""
        metrics = self._evaluated(test_dataset, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions=None, label_ids=None, metrics=metrics)

    def _evaluated(self, eval_dataset: Any, prefix: str) -> dict[str, float]:
        with on_all_ranks("the evaluation's prompts"):
            self._follow_datasets()
        prompts = self.eval_prompts
        if isinstance(eval_dataset, str) and isinstance(prompts, dict) and eval_dataset in prompts:
            prompts = prompts[eval_dataset]
        elif eval_dataset is not None and eval_dataset is not self.eval_dataset:
            prompts = eval_prompts_of(eval_dataset, self.policy, self.args, self.feature, self.engine_context)
        if prompts is None:
            raise ValueError("`evaluate` needs prompts: pass an `eval_dataset` to `evaluate` or to the trainer.")
        if not self.is_in_train and self.engine is not None:
            self.engine.invalidate()  # the user may have changed the weights, so copy them to the engine again
        metrics: dict[str, float] = {}
        for name, part in (prompts if isinstance(prompts, dict) else {"": prompts}).items():
            full = f"{prefix}_{name}" if name else prefix
            metrics |= {f"{full}_{key}": value for key, value in evaluate_prompts(self, part, full).items()}
        return metrics

    def get_train_dataloader(self) -> DataLoader:
        """Return a data loader. Each item is the list of this rank's prompts of one optimizer step."""
        self._follow_datasets()
        prompts = self.train_prompts
        if not isinstance(prompts, PromptDataset):
            return prompts.loader()
        args, choice = self.args, prompts.choice
        return PromptLoader(prompts, StepOrder.of(args, len(prompts)) if choice is None else choice.order(args))

    def _follow_datasets(self) -> None:
        given = self.policy, self.args, self.feature, self.engine_context
        if self.train_dataset is not self._tokenised[0]:
            self.train_prompts = train_prompts_of(self.train_dataset, *given)
        if self.eval_dataset is not self._tokenised[1]:
            self.eval_prompts = eval_prompts_of(self.eval_dataset, *given)
        self._tokenised = (self.train_dataset, self.eval_dataset)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return transformers' tuple of training values, with ``max_steps`` raised to a multiple of `round_length`.

        A round has the optimizer steps from one generation to the next. No run can resume in the middle of a round."""
        *values, max_steps = super().set_initial_training_values(args, dataloader)
        return (*values, -(-max_steps // self.args.round_length) * self.args.round_length)

    @property
    def engine_context(self) -> int | None:
        return None if self.engine is None else self.engine.context

    def _open_records(self, checkpoint: str | None, resumes: bool) -> None:
        args: GRPOConfig = self.args
        lines, problem = [], ""
        with on_all_ranks("the run's folder"):
            goes_on = checkpoint is not None or (resumes and self.journal is not None and bool(self.journal.rounds()))
            moves = args.should_save and not goes_on
            if moves and (aside := folders.set_aside(str(args.output_dir), self.policy.path)) is not None:
                lines.append(f"an earlier run's files in {os.path.relpath(args.output_dir)} are now in {aside}")
        with on_all_ranks("the journal"):
            if self.journal is not None:
                step = folders.step_of(checkpoint) if checkpoint else 0
                lines += self.journal.start(step, args.should_save, args.rescore)
                problem = self.journal.keep_recipe(self.facts.get("settings")) if args.should_save else ""
        for line in lines:
            self.console.say(line)
        self.console.warn_of_all(gather(problem))

    def begin_records(self, evaluation: str = "") -> None:
        if not self.args.keeps_journal or not self.is_in_train:
            return
        with on_all_ranks("the journal"), self.times.phase("journal"):
            digest = "" if self.args.tensor_parallel else digest_of(self.model)  # no digest: no rank has a whole model
            problem = self.journal.begin(self.state.global_step, digest, evaluation) if self.journal else ""
        self.console.warn_of_all(gather(problem))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log metrics. Next to a training loss, log each step metric's mean since the last logged training loss."""
        if self._unlogged and ("loss" in logs or "train_loss" in logs):
            for name in dict.fromkeys(name for entry in self._unlogged for name in entry):
                values = [entry[name] for entry in self._unlogged if name in entry]
                logs[name] = sum(values) / len(values)
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
            self._unlogged = []
        super().log(logs, start_time)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing, because `training.assembly.assemble` moves the model."""

    def compute_loss_context_manager(self) -> Any:
        return self.accelerator.autocast()

    @ends_together("saving")
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._gathered = self.sharding.state_dict(keep=self.args.should_save)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:  # transformers >= 5.24 calls `_save` on every rank
            return
        if state_dict is None:
            state_dict = self._gathered
            if state_dict is None and self.policy.adapter is None:
                state_dict = state_dict_on_host(self.model, self.checkpointer.weight_places())
        with saving_model(self.model, self.checkpointer.write_tensors):
            super()._save(output_dir, state_dict)
        folders.open_to_readers(output_dir or self.args.output_dir)
        if self.policy.quantization is not None:
            self.policy.quantization.write(output_dir or str(self.args.output_dir), self.model.dtype)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        watchdog.progress("saving the optimizer")
        optimizer, write, leads = self.checkpointer.optimizer, self.checkpointer.write_tensors, self.args.should_save
        if not self.sharding.save_optimizer(optimizer, Path(output_dir), leads, write):
            super()._save_optimizer_and_scheduler(output_dir)
        elif leads:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
        watchdog.progress()
        for second in self.learner.second_models.values() if self.args.should_save else ():
            second.save(output_dir, self.checkpointer.write_tensors)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The first rank of an engine samples its groups. Completion lengths decide the order of requests in vLLM.
        if self.args.layout.engine_place == 0:
            self.lengths.save(output_dir, self.args.layout.data_rank)
            self.round.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        usual = functools.partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self.checkpointer.load_weights(resume_from_checkpoint, usual)

    def _load_best_model(self) -> None:
        self.checkpointer.load_weights(str(self.state.best_model_checkpoint), super()._load_best_model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        state = self.model.state_dict()
        absent = {*load_result.missing_keys} - {*(self.model._keys_to_ignore_on_save or ())}
        loaded = {state[name].data_ptr() for name in state.keys() - absent}  # Of tied tensors a file has only one.
        if lacking := sorted(name for name in absent & state.keys() if state[name].data_ptr() not in loaded):
            raise ValueError(
                f"The checkpoint lacks {len(lacking)} of the policy's parameters, e.g. {', '.join(lacking[:3])}: use a "
                "complete checkpoint of this model."
            )
        super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.checkpointer.load_optimizer(checkpoint)
        self.lengths.load(checkpoint, self.args.layout.data_rank)
        self.round.load(checkpoint)
        for second in self.learner.second_models.values():
            with loading(checkpoint, "a second model"):
                second.load(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with loading(str(checkpoint), "the random state"):
            super()._load_rng_state(checkpoint)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            self.sharding.share(optimizer)
        return optimizer

    def init_hf_repo(self, token: str | None = None, **options: Any) -> None:
        try:
            super().init_hf_repo(token, **options)  # with transformers >= 5.24 `options` has `private`
        except (OSError, ValueError, HTTPError) as error:
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(
                f"`push_to_hub: true` needs a repository on the Hub, but creating {name!r} failed ({why}). "
                "Check the connection, and use a token with write access (`hf auth login`, or HF_TOKEN). Or set "
                f"`push_to_hub: false`, and later run `hf upload {name} {os.path.relpath(self.args.output_dir)}`."
            ) from None

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Call the hook ``model_card``, which writes the model card (README.md).

        Args:
            model_name: name of the model, by default the output directory's name.
            dataset_name: name of the dataset, by default the dataset in the recipe.
            tags: tags for the Hub, in addition to the default tags.
        """
        if self.is_world_process_zero():
            for write in hooks("model_card"):
                write(self, model_name, dataset_name, tags)

"""`CheckpointedTrainer` for a model that sees packed rows: transformers' other hooks.

It looks at the gradient's norm before the weights change, casts, logs, saves, and writes the model card.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..config import GRPOConfig
from ..engine.queue_order import LengthHistory
from ..parallel.faults import ends_together
from ..policy.loading import Policy
from ..reporting.console import Console, Timekeeper
from ..reporting.metrics import PhaseTimes
from ..reporting.model_card import SETTINGS, RunFacts, write_card
from ..rewards import RewardFunction
from ..weights import state_dict_on_host
from .checkpointed_trainer import CheckpointedTrainer
from .recording import Recorder


class PackedTrainer(CheckpointedTrainer):
    """Does for packed rows what `transformers.Trainer` would do as for padded batches."""

    policy: Policy
    rewards: list[RewardFunction]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model_accepts_loss_kwargs = True  # the step's denominator is applied in it, not by transformers
        # No DDP around the model: ranks hold full copies whose gradients are summed once per step.
        self.accelerator.prepare_model = lambda model, **kwargs: model
        self.facts = {}
        self.times = PhaseTimes(synchronize=self.args.device.type == "cuda")
        self.console = Console(self.is_world_process_zero(), bars=not self.args.disable_tqdm)
        self.lengths = LengthHistory()
        self._logs: list[dict[str, float]] = []  # one entry per step since the last log
        self.figures: dict[str, float] = {}  # of the present step: its loss, its gradient's norm
        self._step_started = 0.0
        self._gathered: dict[str, torch.Tensor] | None = None  # the weights to be saved, of a policy that is cut
        for shown in (ProgressCallback, PrinterCallback):
            self.remove_callback(shown)
        self.add_callback(self.console)
        self.add_callback(Timekeeper(self.times, self._finish_step))
        self.run_record = Recorder(self, self.is_world_process_zero())
        self.add_callback(self.run_record)

    def _save_rng_state(self, output_dir: str) -> None:
        """And this rank's history of lengths, which says what the engine's batches will be."""
        super()._save_rng_state(output_dir)
        if self.args.layout.engine_place == 0:  # which has seen them
            self.lengths.save(output_dir, self.args.layout.data_rank)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:  # here and not with the random state, which comes after the first generation
            self.lengths.load(checkpoint, self.args.layout.data_rank)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Not before the engine is built: the policy then moves into its memory (see `weights.publisher`)."""

    def _clip_grad_norm(self, model: torch.nn.Module) -> float:
        with self.times.phase("optimizer"):
            return self.sharding.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> float:
        """The norm of the whole gradient; and the last look before the weights change."""
        norm = self.figures["grad_norm"] = self.sharding.clip(math.inf) if grad_norm is None else grad_norm
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"The gradient of step {self.state.global_step + 1} has norm {norm}: training stops before the "
                "weights are touched. Lower learning_rate, or train with dtype: float32."
            )
        return norm

    def compute_loss_context_manager(self) -> Any:
        """bfloat16 autocast where it is asked for. (accelerate would put it into the model, which stays unwrapped.)"""
        return self.accelerator.autocast()

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: transformers' formula assumes padded batches."""
        return 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Nothing: the trainer counts prompts and completions of all ranks when a round is collected."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of the steps since the last log; at the end of training, of those that were never logged."""
        if self._logs and ("loss" in logs or "train_loss" in logs):
            names = dict.fromkeys(name for entry in self._logs for name in entry)
            for name in names:
                values = [entry[name] for entry in self._logs if name in entry]
                logs[name] = sum(values) / len(values)
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
            self._logs = []
        super().log(logs, start_time)

    # -- saving

    @ends_together("saving")
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers. A collective: of a policy that is cut, the ranks bring the one that writes all parts."""
        self._gathered = self.sharding.state_dict(keep=self.args.should_save)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in transformers, from host memory: see `state_dict_on_host`. Of a LoRA policy, the adapter alone."""
        if state_dict is None and self.policy.adapter is None:
            state_dict = self._gathered
            if state_dict is None:
                state_dict = state_dict_on_host(self.model, self.checkpointer.weight_places())
        super()._save(output_dir, state_dict)
        if self.policy.quantization is not None:
            self.policy.quantization.write(output_dir or str(self.args.output_dir), self.model.dtype)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """README.md with the recipe, the command, the dataset, the reward curve and the versions.

        `push_to_hub` takes the same arguments.

        Args:
            model_name: default: the output directory's name.
            dataset_name: default: the recipe's.
            tags: for the Hub, beside the card's own.
        """
        if not self.is_world_process_zero():
            return
        args: GRPOConfig = self.args
        folder = Path(args.output_dir)
        facts = RunFacts(
            model_name=model_name or folder.name,
            base_model=self.policy.path,
            datasets=_listed(dataset_name or self.facts.get("dataset")),
            tags=_listed(tags),
            reward_names=[reward.name for reward in self.rewards],
            reward_weights=[reward.weight for reward in self.rewards],
            recipe=self.facts.get("recipe"),
            command=self.facts.get("command", ""),
            settings={name: getattr(args, name) for name in SETTINGS},
            history=self.state.log_history,
            hub_model_id=args.hub_model_id,
            adapter_rank=self.policy.adapter.rank if self.policy.adapter else 0,
            quantization=None if self.policy.quantization is None else self.policy.quantization.settings,
            images=self.policy.processor is not None,
            base_dtype=str(self.model.dtype).removeprefix("torch."),
        )
        write_card(folder, run=facts)

    def _finish_step(self) -> None:
        """After the optimizer: the step's times, its line, and whether SIGTERM asks for the end."""
        entry = self._logs[-1]
        entry |= self.times.take() | self.sharding.traffic.take()
        entry["step_time"] = time.perf_counter() - self._step_started
        explained = sum(value for name, value in entry.items() if name.startswith("time/"))
        entry["time/other"] = entry["step_time"] - explained
        self.tell_step(entry)

    def tell_step(self, entry: Mapping[str, float]) -> None:
        """Say what became of the step that has ended, and note its figures beside what it was trained on."""
        if self.journal is not None and self.args.layout.is_main:
            self.journal.note(self.state.global_step, self.figures)
        self.console.step(self.state.global_step, self.state.max_steps, entry)
        self.run_record.step(entry)


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())

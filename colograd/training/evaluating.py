"""`PackedTrainer` that evaluates: prompts of their own take the way of a round, and end as metrics."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from transformers.trainer_utils import PredictionOutput

from ..batch import ScoredGroup
from ..config import GRPOConfig
from ..data import PromptDataset
from ..engine.vllm_engine import Engine
from ..losses.advantages import AdvantageEstimator
from ..losses.entropy import EntropyController
from ..losses.mismatch import SamplerMismatch
from ..memory.device_turns import DeviceTurns
from ..parallel.faults import ends_together
from ..parallel.ranks import on_all_ranks
from ..policy.logprobs import evaluation_mode
from ..policy.packing import PackingRules
from ..policy.reference import Reference, with_ref_logprobs
from ..reporting.completion_log import CompletionLog
from ..rollout.rounds import roll_out
from ..rollout.toolbox import Toolbox
from .evaluation import AFFORDABLE, evaluation_metrics, evaluation_step, loss_share
from .task import eval_prompts_of
from .transformers_seam import PackedTrainer


class EvaluatingTrainer(PackedTrainer):
    """Samples, scores and measures evaluation prompts by the stages of a round."""

    engine: Engine
    estimator: AdvantageEstimator
    entropy: EntropyController
    mismatch: SamplerMismatch
    device_turns: DeviceTurns
    reference: Reference | None
    rules: PackingRules
    toolbox: Toolbox | None
    completion_log: CompletionLog | None
    eval_prompts: Any
    _reward_names: list[str]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.evaluating = False  # whether `generate` and `score` are called by `evaluate`
        self._loss_is_affordable: bool | None = None  # where nobody asked for it; None: not known yet

    @ends_together("the evaluation")
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample and score the evaluation prompts with their own settings (``*_eval``), and compute the loss of what
        was sampled, where `loss_eval` asks for it or where that takes little time.

        Args:
            eval_dataset: prompts to take instead of the trainer's, or the name of one of its evaluation datasets.

        Returns:
            ``<prefix>_reward``, ``<prefix>_pass@1`` (and 2, 4 ...), ``<prefix>_rewards/<name>/mean``,
            ``<prefix>_completions/...`` and times; with a dict of datasets, each under ``<prefix>_<its name>``.
        """
        metrics = self._evaluated(eval_dataset, metric_key_prefix)
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @ends_together("the evaluation")
    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """What `evaluate` finds, under another prefix and not logged: metrics, but as in TRL neither predictions nor
        labels."""
        metrics = self._evaluated(test_dataset, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions=None, label_ids=None, metrics=metrics)

    def _evaluated(self, eval_dataset: Any, metric_key_prefix: str) -> dict[str, float]:
        """The metrics of an evaluation of one dataset, or of several by name."""
        with on_all_ranks("the evaluation's prompts"):
            self._follow_datasets()
        given = self.eval_prompts
        if isinstance(eval_dataset, str) and isinstance(given, dict):
            given = given[eval_dataset]
        elif eval_dataset is not None and eval_dataset is not self.eval_dataset:
            given = eval_prompts_of(eval_dataset, self.policy, self.args, self.toolbox, self.engine.context)
        if given is None:
            raise ValueError("evaluate needs prompts: give an eval_dataset to it or to the trainer.")
        if not self.is_in_train:
            self.engine.invalidate()  # anything may have changed the weights since the last step
        parts = given if isinstance(given, dict) else {"": given}
        metrics: dict[str, float] = {}
        self.evaluating = True
        try:
            for name, prompts in parts.items():
                prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
                found = self._evaluate_prompts(prompts, prefix)
                metrics |= {f"{prefix}_{key}": value for key, value in found.items()}
        finally:
            self.evaluating = False
        return metrics

    def _evaluate_prompts(self, prompts: PromptDataset, name: str) -> dict[str, float]:
        """Sample and score every prompt once, over all ranks, as a round does. ``name`` is the completions log's."""
        args: GRPOConfig = self.args
        started = time.perf_counter()
        mine = prompts.prompts(args.layout.data_rank, args.layout.data_size)
        with on_all_ranks("publishing"):
            self.publish()
        self.begin_records(name)
        with self.device_turns.sampling(self.optimizer), on_all_ranks("the evaluation"):
            one_call = args.reward_call == "all"
            groups: list[ScoredGroup] = self.engine.on_engine_leader(
                lambda: roll_out(mine, self._stages(), self.times, one_call), others=[]
            )
            counts = self._take_counts()
        self.run_record.evaluated(groups, name)
        if self.completion_log is not None:
            self.completion_log.add_evaluation(groups, self.decode, self.state, name)
        metrics = evaluation_metrics(groups, counts, self._reward_names, self.combine, args)
        if args.loss_eval is not False:
            metrics |= self._evaluate_loss(groups, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        metrics |= {"runtime": seconds, "samples_per_second": len(prompts) / seconds}
        return metrics | {"num_tokens": float(self.state.num_input_tokens_seen)}

    def _evaluate_loss(self, groups: list[ScoredGroup], seconds: float) -> dict[str, float]:
        """The loss of what was sampled, as if it were a step's, and the loss's metrics; nothing where nobody asked for
        it and it takes too long beside the ``seconds`` of sampling. A collective; no gradients."""
        if self.args.loss_eval is None and self._loss_is_affordable is False:
            return {}
        with on_all_ranks("the advantages"):
            judged = [
                dataclasses.replace(scored, advantages=self._advantages(scored.group, scored.rewards))
                for scored in groups
            ]
        step = evaluation_step(judged, self.estimator, self.rules, self._reward_names, self.times)
        step = dataclasses.replace(step, version=self.state.global_step)
        if self.args.loss_eval is None and self._loss_is_affordable is None:
            with self.compute_loss_context_manager():
                share = loss_share(self.model, step, self.args.temperature, self.reference is not None, seconds)
            if share > AFFORDABLE:
                self.console.warn(
                    f"evaluation: its loss would take another {share:.0%} of the time, and isn't computed: loss_eval: "
                    "true asks for it"
                )
            self._loss_is_affordable = share <= AFFORDABLE
            if not self._loss_is_affordable:
                return {}
        if self.reference is not None:
            with on_all_ranks("the reference's log-probabilities"), self.compute_loss_context_manager():
                (step,) = with_ref_logprobs(self.reference, [step], self.args.temperature)
        with evaluation_mode(self.model):
            step = self._with_entropy(step)
            with on_all_ranks("the evaluation's forward"), torch.no_grad():
                metrics = self._loss_pass(self.model, step, backward=False)
        reduced = metrics.reduce()
        self.entropy.show(reduced, reduced["loss"] - self.loss.router_coef * reduced.get("aux_loss", 0.0))
        self.mismatch.finish(reduced)
        return reduced

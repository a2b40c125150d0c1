"""`GRPOTrainer`: the conductor. One round (the upper row), and each of its optimizer steps (the lower one):

    prompts --> publish --> generate --> score --> compute_advantages --> scale --> balance, pack --> schedule
                   ^        the engine   rewards   of each group          over                        reference, old
                   |                                                      the step                    log-probabilities
                   |                                                                                      |
                   +---- optimizer <-- clip <-- sum_gradients <-- backward <-- compute_loss <-- row by row

    get_train_dataloader   prompts, one item per optimizer step
    get_batch_samples      at a round's start: the upper row; then it hands out the round's steps one by one
    training_step          the lower row, up to the summed gradient
    (transformers.Trainer) clip, optimizer, scheduler, log, evaluate, save

Two ways lead back: dynamic sampling draws further prompts, and a step that runs out of memory is packed again.

To change one stage, override `generate`, `score`, `compute_advantages` or `compute_loss`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import TrainOutput

from .batch import Group, LossOutput, MicroBatch, PackedRow, Prompt, SampledStep, ScoredGroup, StepBatch, StepConstants
from .checkpoint.reading import reading
from .config import GRPOConfig
from .data import PromptDataset, PromptLoader, StreamLoader, extra_prompts
from .engine.arguments import check_split, compiles
from .engine.building import check_experts, check_vllm
from .engine.sampling import Sampling, check_sampling
from .losses.advantages import AdvantageEstimator
from .losses.entropy import EntropyController, with_step_entropy
from .losses.mismatch import SamplerMismatch
from .losses.objective import Objective
from .memory import token_budget
from .memory.segments import expand_segments
from .parallel import faults, watchdog
from .parallel.faults import ends_together
from .parallel.layout import Place, check_engines, check_places
from .parallel.ranks import gather, on_all_ranks
from .policy.layers import check_compiled
from .policy.liger import check_liger
from .policy.loading import load_policy, proven_with_images
from .policy.logprobs import policy_logprobs, routed_logprobs, with_old_logprobs
from .policy.outline import note_on_cpu
from .policy.packing import collate
from .policy.quantized import take_quantization
from .policy.reference import FollowPolicy, FrozenCopy, check_reference, fill, with_ref_logprobs
from .policy.router_replay import replay_figures
from .policy.routing import num_experts
from .policy.row_proof import choose_rows_where_it_trains
from .policy.supported import check_supported
from .reporting.completion_log import completion_log_of
from .reporting.console import Console
from .reporting.metrics import Metrics
from .rewards import Ready, RewardFunction, Scorer, Scoring, weighted_sum, with_models
from .rollout.rounds import draw, unscored
from .rollout.stages import Stages, checked_advantages, checked_rewards
from .rollout.statistics import round_statistics
from .rollout.tool_format import with_messages
from .runtime import process
from .sharding import check_sharding, way_of
from .training.adamw_split import accumulate_in_float32, optimizer_class
from .training.assembly import (
    Assembly,
    Prompts,
    assemble,
    choose_kernels,
    prompts_with_images,
    rollout_source,
    settle_by_memory,
)
from .training.closing import closes_if_it_fails
from .training.evaluating import EvaluatingTrainer
from .training.journaling import journal_of
from .training.loss_pass import loss_pass
from .training.step_batches import packing_rules, scale, schedule, step_batch
from .training.task import (
    check_rewards,
    eval_prompts_of,
    image_reader_of,
    loader_of,
    prepared_config,
    rewards_of,
    rollout_func_of,
    tool_format_of,
    toolbox_of,
    train_prompts_of,
)
from .training.trl_names import TRLNames
from .weights import check_choice


class GRPOTrainer(TRLNames, EvaluatingTrainer):
    """Group Relative Policy Optimization with vLLM in the same process.

    Args:
        model: a Hub id, a folder, a causal language model of transformers, or a PeftModel around one.
        reward_funcs: a reward function or several: names, import paths or callables (see `colograd.rewards`); or reward
            models: modules, folders or Hub ids.
        args: the configuration; its fields are documented in docs/configuration.md.
        train_dataset: a `datasets.Dataset` with a column ``prompt``, plain or conversational. All other columns reach
            the reward functions. An `IterableDataset` is read while training, and needs ``max_steps``. So does None,
            which is enough where an environment makes all prompts.
        eval_dataset: likewise, or a dict of them (such as a DatasetDict); for `evaluate`.
        processing_class: the tokenizer, or a vision-language model's processor; default: the model's.
        reward_processing_classes: the reward models' tokenizers, one per reward function; default: their own.
        callbacks: as in `transformers.Trainer`.
        optimizers: likewise: an optimizer and a schedule.
        peft_config: a `peft.LoraConfig`: train an adapter and leave the model's weights as they are.
        tools: functions that the model may call while it writes (see docs/tools.md).
        rollout_func: ``f(prompts, trainer) -> dict`` that writes completions in the engine's place.
        environment_factory: makes environments, whose methods are tools; or several by name.
        quantization_config: how the model is quantised when it is loaded, below an adapter: a
            `transformers.BitsAndBytesConfig`.

    Raises:
        ValueError: bad input, before anything is trained, on all ranks.
    """

    @closes_if_it_fails
    @ends_together("the start")
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
    ) -> None:
        started = process.command_began() or time.perf_counter()
        args = prepared_config(args, model)
        watchdog.set_limit(args.rank_timeout)
        expand_segments(args)
        places = gather(Place.here(args.device))
        with on_all_ranks("the start"):
            check_places(places)
            check_engines(args.layout, places)
            args.check_for_trainer()
            take_quantization(args, model, quantization_config)
            check_supported(model, args, peft_config)
            if args.layout.is_main and (note := note_on_cpu(model, args)):
                Console(enabled=True, bars=False).warn(note)
            self.check_engine(args)
            check_sharding(args, optimizers[0])
            check_liger(args)
            self.loss, self.entropy = Objective.from_config(args), EntropyController(args)
            self.mismatch = SamplerMismatch(args)
            self.toolbox = toolbox_of(args, tools, environment_factory)
            if self.toolbox is not None:
                self.closing.callback(self.toolbox.close)
            rollout_func = rollout_func_of(rollout_func, self.toolbox, args)
            functions = with_models(reward_funcs, reward_processing_classes, args)
            self.rewards: list[RewardFunction] = rewards_of(functions, args, self.toolbox)
            self.scorer = Scorer(
                self.rewards, args.reward_workers, args.reward_timeout, args.reward_on_error, on_gpu=not args.on_cpu
            )
            self.closing.callback(self.scorer.close)
            self.policy = load_policy(model, processing_class, args, peft_config)
            check_choice(args.weights, self.policy.adapter, args.cuts_weights)
            check_split(args, self.policy.model.config)
            self.loss = dataclasses.replace(self.loss, router_coef=self.policy.router_coef(args))
            check_reference(args, self.policy)
            check_compiled(args, self.policy.why_padded)
            args.settle_precision(self.policy.model.dtype)
            form = tool_format_of(self.toolbox, self.policy, args)
            self.train_prompts = train_prompts_of(train_dataset, self.policy, args, self.toolbox)
            self.eval_prompts = eval_prompts_of(eval_dataset, self.policy, args, self.toolbox)
            self._seen = prompts_with_images([self.train_prompts], self.policy, self.toolbox)
            self.policy = proven_with_images(self.policy, self._seen)
            own = type(self).generate, type(self).score  # a user's give rewards further columns, or ask none of them
            if rollout_func is None and own == (GRPOTrainer.generate, GRPOTrainer.score):
                check_rewards(self.rewards, self.train_prompts, self.toolbox)
        super().__init__(
            model=self.policy.model,
            args=args,
            data_collator=list,
            train_dataset=self.train_prompts,
            eval_dataset=self.eval_prompts,
            processing_class=self.policy.processor or self.policy.tokenizer,
            callbacks=[*(callbacks or []), self.entropy],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_class(args) if optimizers[0] is None else None,
        )
        self.closing.callback(self.checkpointer.stop_signal.remove)
        self.closing.callback(self.checkpointer.finish_alone)
        # Callbacks look at the datasets as they were given.
        self.train_dataset = self.train_prompts.dataset if train_dataset is None else train_dataset
        self.eval_dataset: Any = eval_dataset
        self._tokenised = (self.train_dataset, eval_dataset)
        if args.optim == "adamw_split" and optimizers[0] is None:
            accumulate_in_float32(self.model.parameters())
        self._reward_names = [reward.name for reward in self.rewards]
        self.estimator = AdvantageEstimator.of(args, [reward.weight for reward in self.rewards])
        reads_images = self.policy.processor is not None
        self.completion_log = completion_log_of(args, self._reward_names, self.run_record.trackers, reads_images)
        if self.completion_log is not None:
            self.closing.callback(self.completion_log.close)
        self.journal = journal_of(args, self._reward_names, image_reader_of(self.policy))
        if self.journal is not None:
            self.closing.callback(self.journal.close)
        self._told_unjudged = False  # whether it was said that nobody judged a completion
        self._round: list[StepBatch] = []  # what is left of the present round
        evaluated = self.eval_prompts.values() if isinstance(self.eval_prompts, dict) else [self.eval_prompts]
        prompts = [self.train_prompts, *(part for part in evaluated if part is not None)]
        settle_by_memory(args, self.policy, prompts, self.toolbox)
        way = way_of(args)
        # The token budget in it may change.
        self.rules = packing_rules(args, self.policy, self.loss, equal_counts=way.meets_in_backward)
        built = self.assemble(prompts)
        self.engine, self.weights, self.device_turns = built.engine, built.weights, built.device_turns
        self.memory, self.reference = built.memory, built.reference
        self.sharding = way.for_run(self.model, args)
        self.closing.callback(self._let_go)
        if isinstance(self.reference, FrozenCopy) and not self.reference.offload:
            self.sharding.share_frozen(self.reference.model)
        self.rollout_func = rollout_func
        self.source = rollout_source(self.engine, args, self.policy, self.toolbox, form, rollout_func, trainer=self)
        if args.sync_ref_model and isinstance(self.reference, FrozenCopy):
            self.add_callback(FollowPolicy(self.reference, self.model))
        lines = choose_kernels(args, self.model, self.reference, self.closing, self.compute_loss_context_manager)
        for line in lines:
            self.console.say(line)
        if not args.on_cpu or args.bf16 or args.torch_compile:  # else the rows were proved as they will run
            self._prove_rows()
        self._describe(built, prompts)
        self.console.say(f"ready in {time.perf_counter() - started:.0f} s")

    def check_engine(self, args: GRPOConfig) -> None:
        """Whether there is a vLLM that can do what is asked."""
        check_vllm()
        check_sampling(args)

    def assemble(self, prompts: Sequence[Prompts]) -> Assembly:
        """Build the engine beside the policy. A collective. Overridden where nothing is sampled."""
        args: GRPOConfig = self.args
        with on_all_ranks("the engine's experts"):
            check_experts(num_experts(self.policy.model.config), args.on_cpu)
        if compiles(args):
            self.console.say("engine: vLLM starts, compiles and captures graphs: 1 to 3 minutes, less the next time")
        return assemble(args, self.policy, prompts, self.toolbox, self.rules.max_tokens, self.times, self.closing)

    def _prove_rows(self) -> None:
        """Prove the rows where they will run: on the device's kernels, compiled where they are, under autocast. A
        collective."""
        reference = None if self.reference is None else self.reference.model
        with self.compute_loss_context_manager():
            why = choose_rows_where_it_trains(self.model, self.args.device, reference, self._seen)
        check_compiled(self.args, why)
        if why != self.policy.why_padded:
            self.policy = dataclasses.replace(self.policy, why_padded=why)
            self.rules = dataclasses.replace(self.rules, share_prompts=not why)

    def _describe(self, built: Assembly, prompts: Sequence[Prompts]) -> None:
        """Say what the user should know at start."""
        args: GRPOConfig = self.args
        lines = [*built.describe(), *self.scorer.notes, *(self.toolbox.notes if self.toolbox else [])]
        lines += [*self.policy.describe(args, self.rules.max_tokens), self.sharding.describe()]
        for line in filter(None, lines):
            self.console.say(line)
        for line in built.warnings(args, self.policy, prompts):
            self.console.warn(line)

    # -- stages: a subclass replaces any of these

    def generate(self, prompts: Sequence[Prompt]) -> Generator[Group]:
        """Sample each prompt's group; yield groups as they finish. Override to change how completions come about.

        Both training and `evaluate` come by here; ``self.evaluating`` tells them apart.
        """
        purpose = "eval" if self.evaluating else "train"
        sampling = Sampling.for_evaluation(self.args) if self.evaluating else Sampling.for_training(self.args)
        bar = self.console.generation(len(prompts), "evaluate" if self.evaluating else "generate")
        version, seed = self.state.global_step, self.args.seed
        if len(prompts) * sampling.n > self.engine.max_sequences:
            prompts = self.lengths.longest_first(prompts)
        asked = {prompt.position: prompt for prompt in prompts}
        for group in self.source.generate(prompts, sampling, version=version, seed=seed, purpose=purpose):
            self.lengths.add(asked[group.position], group)
            bar.update(sum(len(rollout.completion_ids) for rollout in group.rollouts))
            yield group
        bar.close()

    def score(self, group: Group) -> torch.Tensor:
        """Rewards [G, R] float32 of one group, NaN where a function abstains. Override for rewards of your own."""
        return self._submit([group]).result()

    def compute_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages of one group: [G], or one per completion token ([sum of lengths]). Override for others.

        With `scale_rewards: batch` or `normalize_then_sum` what this returns is divided by a deviation over the step.
        """
        return self.estimator.of_group(rewards)

    def compute_loss(self, model: torch.nn.Module, micro_batch: MicroBatch, **kwargs: Any) -> LossOutput:
        """The objective on one micro-batch, as an unnormalised sum. Override for another objective."""
        entropy_gradient = self.loss.needs_entropy_gradient(micro_batch)
        temperature, routing = self.args.temperature, None
        if self.policy.tells_routing:
            logprobs, entropy, routing = routed_logprobs(model, micro_batch, temperature, entropy_gradient)
        else:
            logprobs, entropy = policy_logprobs(model, micro_batch, temperature, entropy_gradient)
        self.run_record.keep(micro_batch, logprobs)
        output = self.loss(logprobs, entropy, micro_batch, routing)
        if self.args.router_replay:
            output = dataclasses.replace(output, sums={**output.sums, **replay_figures(model, micro_batch)})
        return output

    # -- what stages are made of

    def combine(self, rewards: torch.Tensor) -> torch.Tensor:
        """[G, R] rewards -> [G] weighted sums."""
        return weighted_sum(rewards, self.estimator.weights)

    def decode(self, group: Group) -> list[str]:
        """The completions' texts, for rewards and logs."""
        ids = [list(rollout.completion_ids) for rollout in group.rollouts]
        return self.policy.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def _stages(self) -> Stages:
        """The stages from prompts to scored groups, as training and `evaluate` take them."""
        journal = self.journal if self.is_in_train else None
        return Stages(self.generate, self._begin_score, self._judge, self.scorer.take_logged, journal)

    def _begin_score(self, groups: Sequence[Group]) -> Scoring | Ready:
        """Begin to score groups while the engine goes on decoding; the result is [completions, R]."""
        if getattr(self.score, "__func__", None) is not GRPOTrainer.score:
            functions = len(self.rewards)
            return Ready(torch.cat([checked_rewards(self.score(group), group, functions) for group in groups]))
        return self._submit(groups)

    def _submit(self, groups: Sequence[Group]) -> Scoring:
        read = [with_messages(group, self.policy.tokenizer) for group in groups]
        texts = [self.decode(group) for group in groups]
        if self.completion_log is not None:
            self.completion_log.keep(groups, texts)
        return self.scorer.submit(read, texts, self.state)

    def _judge(self, group: Group, rewards: torch.Tensor) -> ScoredGroup:
        """The group with its rewards and its advantages."""
        advantages = torch.zeros(len(group.rollouts)) if self.evaluating else self._advantages(group, rewards)
        return ScoredGroup(group, rewards, advantages)

    def _advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        return checked_advantages(self.compute_advantages(group, rewards), group)

    def _take_counts(self) -> dict[str, float]:
        """Sums of rewards and tools since the last call."""
        return self.scorer.take_counts() | (self.toolbox.take_counts() if self.toolbox else {})

    # -- a round: prompts -> optimizer steps

    def get_train_dataloader(self) -> PromptLoader | StreamLoader:
        """One item is the list of prompts of one optimizer step on this rank."""
        self._follow_datasets()
        return loader_of(self.train_prompts, self.args)

    def _follow_datasets(self) -> None:
        """Tokenise a dataset that was put in the place of the trainer's."""
        train_dataset, eval_dataset = self._tokenised
        given = self.policy, self.args, self.toolbox, self.engine.context
        if self.train_dataset is not train_dataset:
            self.train_prompts = train_prompts_of(self.train_dataset, *given)
        if self.eval_dataset is not eval_dataset:
            self.eval_prompts = eval_prompts_of(self.eval_dataset, *given)
        self._tokenised = (self.train_dataset, self.eval_dataset)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As in transformers; a fraction of an epoch ends with a round, so that its last step has a checkpoint."""
        *values, max_steps = super().set_initial_training_values(args, dataloader)
        return (*values, -(-max_steps // self.args.round_length) * self.args.round_length)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The next optimizer step's `StepBatch`. At the start of a round: publish, and collect the whole round."""
        self._step_started = time.perf_counter()
        self.times.take()  # what an evaluation took is no step's
        if not self._round:
            # The loader gives a round's prompts num_iterations times; they are sampled once.
            items = [next(epoch_iterator) for _ in range(self.args.round_length)]
            self._round = self._collect(items[: self.args.steps_per_generation])
        return [self._round.pop(0)], None

    def _collect(self, prompts: list[list[Prompt]]) -> list[StepBatch]:
        """The upper row: the prompts of a round's steps -> the steps, in the order in which they are trained."""
        self.publish()
        if not self.rules.max_tokens:
            self._measure_budget()
        self.begin_records()
        drawn = scale(self._draw(prompts), self.estimator)
        self._log_completions(drawn)
        counts, masked = self._take_counts(), self.rules.mask_truncated
        with on_all_ranks("the statistics"):
            statistics = round_statistics(drawn, counts, self.combine, masked, self.args.dynamic_sampling)
            self.run_record.note(drawn, statistics, self.combine)
        steps = [
            step_batch(step, found, self.rules, self._reward_names, self.times, self.run_record.sampled)
            for step, found in zip(drawn, statistics, strict=True)
        ]
        self.state.num_input_tokens_seen += int(sum(step.metrics["train/rollout_tokens"] for step in steps))
        return self._schedule(steps)

    def _draw(self, prompts: list[list[Prompt]]) -> list[SampledStep]:
        """Generate, score, compute advantages."""
        args: GRPOConfig = self.args

        def more_prompts(drawn: int, count: int) -> list[Prompt]:
            assert isinstance(self.train_prompts, PromptDataset), "a streamed one was refused with dynamic_sampling"
            return extra_prompts(self.train_prompts, args, self.state.global_step, drawn, count)

        def draw_all() -> list[SampledStep]:
            return draw(prompts, self._stages(), self.times, args.reward_call == "all", rounds, more_prompts)

        rounds = args.dynamic_sampling_max_rounds if args.dynamic_sampling else 0
        with self.device_turns.sampling(self.optimizer), on_all_ranks("the rollout"):
            drawn = self.engine.on_engine_leader(
                self.run_record.watching(draw_all), others=[SampledStep((), ()) for _ in prompts]
            )
        if self.journal is not None:
            self.times.move("reward", "journal", self.journal.take_seconds())
        return drawn

    def _log_completions(self, drawn: Sequence[SampledStep]) -> None:
        if not self._told_unjudged and (line := unscored(drawn)):
            self._told_unjudged = True  # rank 0 tells of its own completions; the metric counts all ranks'
            self.console.warn(line)
        if self.completion_log is not None:
            with self.times.phase("log"):
                self.completion_log.add([step.sampled for step in drawn], self.decode, self.state)

    def _schedule(self, steps: list[StepBatch]) -> list[StepBatch]:
        """The round's steps in the order of their training, with the log-probabilities that other weights than the
        trained ones give their tokens."""
        while True:
            try:
                return self._ask_others(steps)
            except torch.OutOfMemoryError as error:
                reason = str(error)
            steps = self._back_off(steps, reason, among=len(steps))

    def _ask_others(self, steps: list[StepBatch]) -> list[StepBatch]:
        """Those of the reference, and for steps that train later weights those of the weights that sampled."""
        temperature, autocast = self.args.temperature, self.compute_loss_context_manager
        if self.reference is not None:
            with on_all_ranks("the reference's log-probabilities"), self.times.phase("ref_logprobs"), autocast():
                steps = with_ref_logprobs(self.reference, steps, temperature)

        def ask_old(step: StepBatch) -> StepBatch:
            with self.times.phase("old_logprobs"), autocast():
                return with_old_logprobs(self.model, step, temperature)

        with on_all_ranks("the old log-probabilities"):
            return schedule(steps, self.state.global_step, self.args.num_iterations, ask_old)

    def publish(self) -> None:
        """Give the engine the policy's present weights, unless it has them."""
        with self.times.phase("publish"):
            if self.engine.version != self.state.global_step:
                self.sharding.traffic.published += self.weights.publish(self.state.global_step)

    # -- an optimizer step: forward, backward, gradients

    def training_step(self, model: torch.nn.Module, inputs: StepBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one optimizer step; leaves the summed, normalised gradient in ``.grad``."""
        model.train()
        while True:
            try:
                step = self._with_entropy(inputs)
                with on_all_ranks("training"), self.run_record.trains(step), self.times.phase("train"):
                    metrics = self._loss_pass(model, step)
                break
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # The exception, whose traceback holds activations, is gone.
            inputs, *self._round = self._back_off([inputs, *self._round], reason)
        with self.times.phase("sync"):
            self.sharding.sum_gradients()
            reduced = metrics.reduce()
        loss = self.figures["loss"] = reduced.pop("loss")
        self.entropy.finish(reduced, loss - self.loss.router_coef * reduced.get("aux_loss", 0.0))
        self.mismatch.finish(reduced)
        if line := self.mismatch.advice(reduced):
            self.console.warn(line)
        self._logs.append({**step.metrics, **reduced})
        return torch.tensor(loss, device=self.args.device)

    def _with_entropy(self, step: StepBatch) -> StepBatch:
        """The step, each row of which knows the entropy's threshold and coefficient in this step. A collective."""

        def entropies(row: MicroBatch) -> torch.Tensor:
            with self.compute_loss_context_manager():
                return policy_logprobs(self.model, row, self.args.temperature)[1]

        timed = self.times.phase("entropies")
        return with_step_entropy(step, self.loss, self.entropy.applied, entropies, timed)

    def _loss_pass(self, model: torch.nn.Module, step: StepBatch, backward: bool = True) -> Metrics:
        """This rank's micro-batches through `compute_loss`."""
        denominator, autocast = self.loss.denominator(step), self.compute_loss_context_manager
        sharding = self.sharding if backward else None
        return loss_pass(step, lambda row: self.compute_loss(model, row), denominator, autocast, sharding)

    # -- the token budget of a micro-batch

    def _measure_budget(self) -> None:
        """How many tokens a micro-batch may have on this GPU, beside the engine and the optimizer's state."""
        args: GRPOConfig = self.args

        def train(row: PackedRow) -> None:
            with self.sharding.agree("measuring"), self.compute_loss_context_manager():
                row = dataclasses.replace(row, step_constants=StepConstants(coefficient=args.entropy_coef))
                if self.reference is not None:
                    (row,) = fill(self.reference, [row], args.temperature)
                loss = self.compute_loss(self.model, collate(row)).loss
            with self.sharding.agree("measuring"):
                self.sharding.backward(loss)

        shape = (self.train_prompts.longest, args.max_completion_length or 1, args.num_generations or 1)
        with self.times.phase("measure"):
            pending = token_budget.optimizer_bytes(self.model, self.optimizer, args.optim, self.sharding.parts)
            self.model.train()
            tokens, size = token_budget.measure(train, self._free_gradients, shape, self.rules, pending)
        self.rules = dataclasses.replace(self.rules, max_tokens=tokens)
        self.memory = self.memory.with_measured(tokens, size)
        self.console.say(
            f"memory: room for micro-batches of {tokens:,} tokens, {size / 2**30:.2f} GiB with their gradients"
        )

    def _back_off(self, steps: list[StepBatch], reason: str, among: int = 1) -> list[StepBatch]:
        """A rank ran out of memory: pack this step and the rest of its round in smaller micro-batches, on all ranks."""
        self._free_gradients()
        self.rules, steps = token_budget.back_off(self.rules, steps, reason, among)
        self.console.warn(
            f"memory: step {self.state.global_step + 1} ran out of it and is repeated; micro-batches have at most "
            f"{self.rules.max_tokens:,} tokens from here on"
        )
        return steps

    def _free_gradients(self) -> None:
        self.sharding.discard()
        token_budget.free_memory(self.model)

    # -- the run: train, save, close; `evaluate` is in training/evaluating.py

    @ends_together("training")
    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in transformers; see `CheckpointedTrainer.train` for resuming and stopping."""
        watchdog.set_limit(self.args.rank_timeout)  # another trainer may have set its own
        self._round, self._logs = [], []
        self._take_counts()  # drop what a step counted before it failed
        self.engine.invalidate()  # steps are counted anew, or other weights are loaded
        with self.run_record.run():
            return super().train(*args, **kwargs)

    def at_boundary(self) -> bool:
        """Whether a round has ended: its rollouts aren't saved, so a run can't go on from its middle."""
        return not self._round

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """And, as they are needed to go on, a reference that has moved."""
        watchdog.progress("saving the optimizer")
        super()._save_optimizer_and_scheduler(output_dir)
        watchdog.progress()
        if self.reference is not None and self.args.should_save:
            self.reference.save(output_dir, self.checkpointer.write_tensors)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.reference is not None and checkpoint is not None:
            with reading(checkpoint, "the reference"):
                self.reference.load(checkpoint)

    def close(self) -> None:
        """Free the engine: another trainer may then be made in the same process."""
        self.closing.close()
        faults.leave()

    def _let_go(self) -> None:
        """Of what holds the engine's tensors, and undo what the way of sharding did to the model."""
        self.sharding.close()
        del self.weights, self.sharding
        self.reference = None

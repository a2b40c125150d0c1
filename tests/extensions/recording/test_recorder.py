"""The record of a run for its report: both files' contents and cost. Errors in recording never stop a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from shown_rows import sample_entries, samples_of
from transformers import TrainerCallback

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, LossOutput, MicroBatch, RolloutId, ScoredGroup
from colograd.batch import Rollout as Completion
from colograd.engine.protocol import Load, after_each_step
from colograd.extensions.recording import timeline as lanes_module
from colograd.extensions.recording.event_log import (
    EVENTS,
    FOLDER,
    SAMPLES,
    EventLog,
    events_of,
    histogram,
    json_line,
)
from colograd.extensions.recording.group_views import TokenTexts, chosen_groups, shown_completions
from colograd.extensions.recording.recorder import Recorder, group_row, shown
from colograd.extensions.recording.timeline import MOST_CALLS, MOST_POINTS, Timeline, curve, merged, tail
from colograd.extensions.recording.utilisation import peak_flops
from colograd.policy.logprobs import policy_logprobs

# -- the files


def test_an_event_is_a_whole_line_when_it_is_written(tmp_path: Path) -> None:
    record = EventLog(tmp_path, pytest.fail)
    record.event("log", step=1, metrics={"reward": math.nan, "loss": math.inf, "text": "zwölf\n\u2028", "n": 2})
    line = (tmp_path / FOLDER / EVENTS).read_bytes()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    (event,) = events_of(tmp_path)
    assert event["metrics"] == {"reward": None, "loss": None, "text": "zwölf\n\u2028", "n": 2}
    assert event["kind"] == "log" and abs(event["time"] - time.time()) < 60


def test_what_json_cannot_say_becomes_its_text() -> None:
    odd = {"a": {1}, "b": torch.tensor([1.0, math.nan]), "c": Path("x"), "d": {3: object}, "e": "\ud800"}
    found = json.loads(json_line(odd))
    assert found["a"] == [1] and found["b"] == [1.0, None] and found["c"] == "x" and found["e"] == "?"
    assert list(found["d"]) == ["3"]


def test_a_torn_line_is_left_alone_and_the_next_begins_anew(tmp_path: Path) -> None:
    """The run was killed in the middle of a line and resumed."""
    record = EventLog(tmp_path, pytest.fail)
    record.event("start", step=0)
    record.close()
    with open(tmp_path / FOLDER / EVENTS, "ab") as file:
        file.write(b'{"kind":"log","st')
    again = EventLog(tmp_path, pytest.fail)
    again.event("start", step=1)
    assert [event["step"] for event in events_of(tmp_path)] == [0, 1]


def test_readers_pass_over_what_is_no_entry(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    deep = b"[" * 100_000
    (tmp_path / FOLDER / EVENTS).write_bytes(
        b'[1]\nnull\n\xff\xfe\n{"kind":"log","step":"x"}\n' + deep + b'\n{"kind":1'
    )
    assert [event["step"] for event in events_of(tmp_path)] == ["x"]
    assert events_of(tmp_path / "nothing") == []


def test_a_run_that_goes_on_makes_void_what_it_takes_again(tmp_path: Path) -> None:
    record = EventLog(tmp_path, pytest.fail)
    record.event("start", step=0)
    for step in (1, 2, 3):
        record.event("log", step=step, metrics={"reward": step})
    record.event("start", step=2)
    record.event("log", step=3, metrics={"reward": 30})
    found = [event["metrics"]["reward"] for event in events_of(tmp_path) if event["kind"] == "log"]
    assert found == [1, 2, 30]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    said: list[str] = []
    record = EventLog(tmp_path, said.append)
    for step in range(3):
        record.event("log", step=step)
    assert len(said) == 1 and "report: _report/ can't be written" in said[0] and "the run goes on" in said[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / EVENTS).symlink_to("/dev/full")
    said: list[str] = []
    record = EventLog(tmp_path, said.append)
    for step in range(3):
        record.event("log", step=step)
    assert len(said) == 1 and "No space left on device" in said[0]


def test_a_histogram_counts_all_that_is_finite() -> None:
    found = histogram([0.0, 0.5, 1.0, math.nan, 1.0], bins=2)
    assert found == {"edges": [0.0, 0.5, 1.0], "counts": [1, 3]}
    assert histogram([3.0, 3.0])["counts"] == [2] and histogram([math.nan]) == {"edges": [], "counts": []}


# -- lanes


def test_a_long_rollout_is_recorded_in_few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(lanes_module.time, "perf_counter", lambda: float(next(clock)))
    lanes = Timeline()
    lanes.look(Load(1, 0, 0.0))
    lanes.begin()
    for step in range(20_000):
        lanes.look(Load(20_000 - step, step, step / 20_000))
    for call in range(1000):
        lanes.call("rewards", "slow" if call % 10 else "quick", call, call + 0.5, 2)
    lanes.end(preemptions=3)
    found = lanes.take()
    assert found is not None
    assert len(found["running"]) == len(found["waiting"]) == len(found["kv"]) == MOST_POINTS
    assert found["running"][0][1] == 20_000 and found["running"][-1][1] == 1
    (_, there), *_ = [point for point in found["running"] if point[0] >= found["tail"]]
    assert 9_000 < there < 10_000, "where half of them have ended"
    assert len(found["rewards"]) <= MOST_CALLS and sum(call[3] for call in found["rewards"]) == 2000
    assert found["preemptions"] == 3 and found["tools"] == []
    assert len(json_line(found)) < 10_000, "bytes of a round, of each rank"


def test_the_tail_begins_where_fewer_than_half_run_for_good() -> None:
    assert tail([(0, 8), (1, 2), (2, 8), (3, 4), (4, 3), (5, 1)]) == 4
    assert tail([(0, 8), (1, 8)]) == 1 and tail([]) is None and tail([(0, 0)]) is None
    assert curve([(0, 1), (1, 2)]) == [[0, 1], [1, 2]]
    calls = [("a", float(i), i + 1.0, 1) for i in range(10)]
    assert merged(calls, most=3) == [("a", 0.0, 4.0, 4), ("a", 4.0, 8.0, 4), ("a", 8.0, 10.0, 2)]


def slow(completions: list[Any], **kwargs: Any) -> list[float]:
    time.sleep(0.02)
    return [1.0] * len(completions)


def test_listeners_leave_in_any_order() -> None:
    engine, calls = SimpleNamespace(after_step=[]), list[str]()
    first, second = (after_each_step(engine, functools.partial(calls.append, name)) for name in ("first", "second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    for listener in engine.after_step:
        listener()
    second.__exit__(None, None, None)
    assert calls == ["second"] and engine.after_step == []


# -- samples


def scored(position: int, rewards: list[float], lengths: list[int], **changes: Any) -> ScoredGroup:
    rollouts = tuple(
        Completion(
            (1, 2),
            array("i", [3] * length),
            torch.full((length,), -1.0),
            torch.ones(length, dtype=torch.bool),
            FinishReason.STOP,
            0,
        )
        for length in lengths
    )
    advantages = changes.pop("advantages", torch.tensor(rewards))
    return ScoredGroup(Group({"prompt": "?"}, rollouts, position), torch.tensor(rewards)[:, None], advantages)


def test_the_pieces_of_a_completion_join_to_it() -> None:
    tokenizer = tiny.make_tokenizer()
    ids = tokenizer.encode(" grün\n✓") + [tokenizer.eos_token_id]
    pieces = TokenTexts(tokenizer)(ids)
    assert pieces[:3] == [" ", "g", "r"] and pieces[-1] == "<end>"
    assert pieces[3:5] == ["\ufffd", "\ufffd"], "bytes that are no UTF-8 alone"
    plain = TokenTexts(tokenizer)(tokenizer.encode("1 + 1\t= 2"))
    assert "".join(plain) == "1 + 1\t= 2"


def test_pieces_of_a_vocabulary_that_marks_spaces() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"▁the": 0, "▁c": 1, "at": 2, "<0xE2>": 3, "</s>": 4}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    pieces = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    assert pieces([0, 1, 2, 3, 4]) == [" the", " c", "at", "\ufffd", "</s>"]


def test_the_groups_that_differ_most_are_chosen() -> None:
    groups = [scored(0, [1.0, 1.0], [2, 2]), scored(1, [0.0, 1.0], [2, 2]), scored(2, [0.5, 0.5], [2, 2])]
    trainer = {
        RolloutId(2, 0): torch.tensor([-1.5, -1.0]),
        RolloutId(1, 0): torch.tensor([-1.1, -1.0]),
    }
    judged = [(group, group.rewards[:, 0].tolist()) for group in groups]

    def chosen(number: int, known: Any = trainer) -> list[int]:
        return [group.group.position for group, _ in chosen_groups(judged, known, number)]

    assert chosen(1) == [1] and chosen(2) == [1, 2] and chosen(9) == [0, 1, 2] and chosen(0) == []
    assert chosen(2, {}) == [0, 1], "else the first"


def test_a_repetition_counts_as_truncated() -> None:
    found = scored(0, [0.0, 1.0], [2, 2])
    first, second = found.group.rollouts
    repeated = dataclasses.replace(first, finish_reason=FinishReason.REPETITION)
    group = dataclasses.replace(found.group, rollouts=(repeated, second))
    assert group_row(dataclasses.replace(found, group=group), lambda rewards: rewards[:, 0])[5] == 0.5


def test_a_long_completion_is_cut_and_says_so() -> None:
    tokenizer = tiny.make_tokenizer()
    group = scored(5, [0.0, math.nan], [6000, 2], advantages=torch.arange(6002) / 10)
    known = {RolloutId(5, 0): torch.zeros(6000)}
    long, short = sample_entries([(group, [0.0, math.nan])], "train", ["right"], known, TokenTexts(tokenizer), False)
    assert long["cut"] and "cut" not in short
    for name in ("tokens", "sampler", "trainer", "advantage", "mask", "sampled"):
        assert len(long[name]) == 4096, name
    assert short["trainer"] is None and short["advantage"] == [600.0, 600.1]
    assert json.loads(json_line(short))["rewards"] == {"right": None}


def test_what_is_recorded_of_a_step_is_bounded(tmp_path: Path) -> None:
    """Two groups of 16 completions of 4,096 tokens: half a megabyte, in some hundredths of a second."""
    tokenizer, groups = tiny.make_tokenizer(), [(scored(p, [0.0] * 16, [4096] * 16), [0.0] * 16) for p in (0, 1)]
    pieces, started = TokenTexts(tokenizer), time.process_time()
    record = EventLog(tmp_path, pytest.fail)
    record.samples(1, shown_completions(groups, "train", ["f"], {}, pieces, False))
    path = tmp_path / FOLDER / SAMPLES
    assert path.stat().st_size < 2**19 and len(samples_of(tmp_path)) == 32
    assert time.process_time() - started < 2


# -- a run


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A recorded run with rounds of two steps, a solved group, an evaluation, and a hostile folder name."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"steps_per_generation": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 4}
    config = tiny.config(folder, hub_token="hf_abcdefghijklmnopqrstu", **changes)
    trainer = GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts(), tiny.prompts(3))
    trainer.facts |= {"command": f"colograd train --output_dir {folder} --hub_token hf_abcdefghijklmnopqrstu"}
    try:
        trainer.train()
        yield SimpleNamespace(folder=folder, trainer=trainer, events=events_of(folder), samples=samples_of(folder))
    finally:
        trainer.close()


def of_kind(run: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["kind"] == kind]


@pytest.mark.engine
def test_a_run_says_what_it_is_and_how_it_ended(recorded: Any) -> None:
    (start,), (end,) = of_kind(recorded, "start"), of_kind(recorded, "end")
    assert (start["step"], start["max_steps"], start["resumed"]) == (0, 4, False)
    run = start["run"]
    assert run["reward_names"] == ["vowels"] and run["reward_weights"] == [1.0] and run["ranks"] == 1
    assert run["device"].startswith("cpu: ") and run["versions"]["vllm"] and run["layers"] == 2 and run["hidden"] == 64
    assert run["parameters"] == run["trained_parameters"] == recorded.trainer.policy.model.num_parameters()
    assert run["peak_source"] == "measured: a float32 product of 1024 x 1024" and run["peak_flops"] > 1e8
    assert run["settings"]["learning_rate"] == 1e-3 and "learning_rate" in run["changed"]
    assert "epsilon" not in run["changed"] and run["settings"]["report_groups"] == 2
    parts = [row["part"] for row in start["memory"]]
    assert "optimizer state" in parts and any(row["training"] > 0 for row in start["memory"])
    assert (end["step"], end["status"], end["error"]) == (4, "finished", "")
    text = (recorded.folder / FOLDER / EVENTS).read_text()
    assert "hf_abc" not in text and "hub_token" not in run["settings"] and str(recorded.folder.parent) not in text


@pytest.mark.engine
def test_every_step_has_its_line_whatever_is_logged(recorded: Any) -> None:
    lines = [event for event in of_kind(recorded, "log") if "reward" in event["metrics"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "logging_steps is 4"
    for line in lines:
        metrics = line["metrics"]
        assert {"loss", "grad_norm", "learning_rate", "step_time", "time/train", "entropy"} <= set(metrics)
        assert 0 <= metrics["completions/duplicates"] < 1
        assert metrics["mfu"] > 0
    (logged,) = (entry for entry in recorded.trainer.state.log_history if "grad_norm" in entry)
    assert lines[-1]["metrics"]["grad_norm"] == logged["grad_norm"]
    assert lines[-1]["metrics"]["learning_rate"] == logged["learning_rate"]
    assert sum(line["metrics"]["loss"] for line in lines) / 4 == pytest.approx(logged["loss"], rel=1e-4)
    evaluations = [event for event in of_kind(recorded, "log") if "eval_reward" in event["metrics"]]
    assert [event["step"] for event in evaluations] == [2, 4]
    (summary,) = (event for event in of_kind(recorded, "log") if "train_runtime" in event["metrics"])
    assert summary["step"] == 4 and "reward" not in summary["metrics"]


@pytest.mark.engine
def test_rollouts_have_their_lanes(recorded: Any) -> None:
    rollouts = of_kind(recorded, "rollout")
    assert [(event["step"], event["rank"]) for event in rollouts] == [(1, 0), (3, 0)]
    for event in rollouts:
        assert max(n for _, n in event["running"]) == 32 and event["running"][-1][1] == 0
        assert 0 < max(share for _, share in event["kv"]) <= 1 and event["preemptions"] == 0
        assert 0 < event["tail"] <= event["seconds"]
        assert [name for name, *_ in event["rewards"]] == ["vowels"] * 8 and event["tools"] == []
        assert all(0 <= start <= end <= event["seconds"] + 0.001 for _, start, end, _ in event["rewards"])
        assert sum(call[3] for call in event["rewards"]) == 32


@pytest.mark.engine
def test_groups_and_histograms_are_of_all_completions(recorded: Any) -> None:
    logs = {event["step"]: event["metrics"] for event in of_kind(recorded, "log") if "reward" in event["metrics"]}
    groups, spreads = of_kind(recorded, "groups"), of_kind(recorded, "spread")
    assert [event["step"] for event in groups] == [event["step"] for event in spreads] == [1, 2, 3, 4]
    for event, spread in zip(groups, spreads, strict=True):
        metrics = logs[event["step"]]
        assert len(event["groups"]) == 4 and all(row[2] == 4 and len(row[0]) == 16 for row in event["groups"])
        assert sum(row[3] for row in event["groups"]) / 4 == pytest.approx(metrics["reward"], abs=1e-3)
        truncated = sum(row[5] for row in event["groups"]) / 4
        assert truncated == pytest.approx(metrics["completions/clipped_ratio"], abs=1e-3)
        assert sum(spread["rewards"]["counts"]) == sum(spread["lengths"]["counts"]) == 16
        assert spread["lengths"]["edges"][-1] == metrics["completions/max_length"]
    named = [row[7] for event in groups for row in event["groups"] if len(row) > 7]
    keys = {row[0] for event in groups for row in event["groups"]}
    assert len(named) == len(keys) and set(named) <= {row["prompt"][0]["content"] for row in tiny.prompts()}, (
        "each text once"
    )


@pytest.mark.engine
def test_samples_show_what_sampler_and_trainer_said_of_each_token(recorded: Any) -> None:
    assert list(recorded.trainer.model.parameters())
    trained = [entry for entry in recorded.samples if entry["purpose"] == "train"]
    assert {entry["step"] for entry in trained} == {1, 2, 3, 4} and len(trained) == 4 * 2 * 4
    tokenizer, rows = recorded.trainer.processing_class, 0
    for entry in trained:
        size = len(entry["tokens"])
        assert size == len(entry["sampler"]) == len(entry["mask"]) == len(entry["sampled"]) > 0
        assert entry["prompt"][0]["role"] == "user" and set(entry["rewards"]) == {"vowels"}
        assert isinstance(entry["advantage"], float) and entry["finish"] in ("stop", "length")
        if entry["trainer"] is not None:
            rows += 1
            assert entry["trainer"] == pytest.approx(entry["sampler"], abs=0.01)
    assert rows == len(trained), "all of them were trained, and on this rank"
    assert tokenizer is not None
    evaluated = [entry for entry in recorded.samples if entry["purpose"] == "eval"]
    assert {entry["step"] for entry in evaluated} == {2, 4} and all(entry["trainer"] is None for entry in evaluated)


@pytest.mark.engine
def test_the_cost_of_a_record(recorded: Any) -> None:
    """The record has at most 16 KiB a step. A look at the load takes 50 us, and a step of the engine 500 us."""
    size = sum(path.stat().st_size for name in (FOLDER, "_journal") for path in (recorded.folder / name).rglob("*.*"))
    assert size < 4 * 16_384
    lanes, load = Timeline(), Load(32, 0, 0.5)
    lanes.begin()
    started = time.process_time()
    for _ in range(10_000):
        lanes.look(load)
    assert (time.process_time() - started) / 10_000 < 50e-6
    started = time.process_time()
    for _ in range(100):
        recorded.trainer.engine.load()
    assert (time.process_time() - started) / 100 < 500e-6


@pytest.mark.engine
def test_run_is_recorded_as_finished_failed_or_stopped(recorded: Any, tmp_path: Path) -> None:
    trainer, record = recorded.trainer, recorded.trainer.recorder
    record.file = EventLog(tmp_path, pytest.fail)

    def ends(work: Any) -> dict[str, Any]:
        with pytest.raises((ValueError, KeyboardInterrupt)) if work else contextlib.nullcontext():
            with record.run():
                record._is_open = True
                if work:
                    raise work
        return events_of(tmp_path)[-1]

    assert ends(None)["status"] == "finished"
    failed = ends(ValueError(f"the file {tmp_path}/a is missing"))
    assert failed["status"] == "failed" and failed["error"] == "ValueError: the file a is missing"
    assert ends(KeyboardInterrupt())["status"] == "stopped"
    trainer.checkpointer.stop_signal.received = True
    assert ends(None)["status"] == "stopped"
    trainer.checkpointer.stop_signal.received = False


class Reinforce(GRPOTrainer):
    """A trainer with a user's `compute_loss` that doesn't report its log-probabilities."""

    def compute_loss(self, model: Any, micro_batch: MicroBatch, **kwargs: Any) -> LossOutput:
        logprobs, _ = policy_logprobs(model, micro_batch, self.args.temperature)
        return LossOutput(-(logprobs * micro_batch.advantages * micro_batch.loss_mask).sum(), {}, {}, {})


class StopAfter(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.engine
def test_a_run_that_goes_on_goes_on_with_its_record(tiny_model: Path, tmp_path: Path, closing) -> None:
    config = {"save_strategy": "steps", "save_steps": 2}
    first = closing(
        Reinforce(
            str(tiny_model), tiny.vowels, tiny.config(tmp_path, **config), tiny.prompts(), callbacks=[StopAfter()]
        )
    )
    first.train()
    assert events_of(tmp_path)[-1]["status"] == "stopped"
    assert all(entry["trainer"] is None and entry["sampler"] for entry in samples_of(tmp_path))
    first.close()
    second = closing(GRPOTrainer(str(tiny_model), tiny.vowels, tiny.config(tmp_path, **config), tiny.prompts()))
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    events = events_of(tmp_path)
    again = [event for event in events if event["kind"] == "start"][-1]
    assert (again["step"], again["resumed"]) == (2, True)
    steps = [event["step"] for event in events if event["kind"] == "log" and "reward" in event["metrics"]]
    assert steps == [1, 2, 3, 4] and events[-1]["status"] == "finished"
    trained = {entry["step"]: entry["trainer"] is not None for entry in samples_of(tmp_path)}
    assert trained == {1: False, 2: False, 3: True, 4: True}
    assert len(second.recorder._advisor.history.steps) == 4, "the advisor remembers"


def test_what_goes_wrong_in_recording_ends_the_record_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    args = tiny.config(tmp_path)
    recorder = Recorder(SimpleNamespace(args=args, console=SimpleNamespace(warn=said.append)), is_main=True)
    recorder._is_open = True
    recorder.step({"time/train": 1.0})  # there is no state
    recorder.step({})
    assert len(said) == 1 and "report: the run isn't recorded any further (AttributeError" in said[0]


def test_nothing_is_recorded_where_nothing_is_wanted(tmp_path: Path) -> None:
    args = tiny.config(tmp_path, report=False)
    recorder = Recorder(SimpleNamespace(args=args, console=SimpleNamespace(warn=pytest.fail)), is_main=True)
    recorder.on_train_begin(args, None, None)
    recorder.on_log(args, None, None, logs={"eval_reward": 1.0})
    with recorder.watching():
        pass
    assert not (tmp_path / FOLDER).exists()
    with pytest.raises(ValueError, match="`report_groups` is -1, but must be at least 0"):
        tiny.config(tmp_path, report_groups=-1)


def test_what_is_shown_has_no_secrets_and_no_absolute_paths() -> None:
    value = {"output_dir": "/home/me/runs/first", "api_key": "abc", "list": ["--hub_token hf_x", "/a/b c"]}
    assert shown(value) == {"output_dir": "first", "list": ["--hub_token <removed>", "b c"]}


def test_an_unknown_device_is_measured() -> None:
    peak, source = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e14 and source == "measured: a float32 product of 1024 x 1024"

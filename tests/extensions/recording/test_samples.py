"""Samples: the completions that a run records token by token, and what the report and `colograd show` read of them."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from shown_rows import samples_of

from colograd.apps.cli import main
from colograd.apps.report.samples import Samples
from colograd.batch import FinishReason, Group, Logged, ModelInput, Rollout, RolloutId, ScoredGroup
from colograd.extensions.recording.event_log import FOLDER, SAMPLES, EventLog
from colograd.extensions.recording.group_views import TokenTexts, shown_completions
from colograd.rollout.record_file import Record, RecordFile

TOKENIZER = tiny.make_tokenizer()


def scored(position: int, text: str = "ab") -> ScoredGroup:
    ids = array("i", TOKENIZER.encode(text))
    rollouts = tuple(
        Rollout(ModelInput((1, 2)), ids, -torch.arange(len(ids)) / 8, torch.ones(len(ids), dtype=torch.bool), end, 0)
        for end in (FinishReason.STOP, FinishReason.LENGTH)
    )
    group, rewards = Group({"prompt": f"prompt {position}"}, rollouts, position), torch.tensor([[1.0], [float("nan")]])
    return ScoredGroup(group, rewards, torch.tensor([0.5, -0.5]), Logged({"note": ("x", None)}, {}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a run that showed one group, in step 4 and in an evaluation before the first step."""
    record, group = EventLog(tmp_path, pytest.fail), scored(6)
    trainer = {RolloutId(6, 0): torch.full((2,), -0.25)}
    for step, purpose in ((4, "train"), (0, "eval")):
        shown = shown_completions(
            [(group, [1.0, float("nan")])], purpose, ["right"], trainer, TokenTexts(TOKENIZER), False
        )
        record.samples(step, shown)
    record.close()
    return tmp_path / FOLDER / SAMPLES


def test_show_prints_samples_where_completions_are_not_logged(path: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["show", str(tmp_path), "--width", "100"]) == 0
    printed = capsys.readouterr().out
    assert "Step 4" in printed and "prompt 6" in printed and "right" in printed and "note" in printed
    assert main(["show", str(tmp_path), "--step", "3"]) == 2
    assert "step 3 isn't in the log of" in capsys.readouterr().err


def test_samples_have_what_sampler_and_trainer_know_of_each_token(path: Path, tmp_path: Path) -> None:
    found = samples_of(tmp_path)
    assert {(entry["purpose"], entry["step"]) for entry in found} == {("train", 4), ("eval", 0)}
    first, second = (entry for entry in found if entry["purpose"] == "train")
    assert [(entry["position"], entry["index"]) for entry in (first, second)] == [(6, 0), (6, 1)]
    assert first["tokens"] == ["a", "b"] and first["prompt"] == "prompt 6" and first["finish"] == "stop"
    assert first["sampler"] == [0.0, -0.125] and first["trainer"] == [-0.25, -0.25] and second["trainer"] is None
    assert first["rewards"] == {"right": 1.0} and first["extra"] == {"note": "x"} and second["advantage"] == -0.5
    assert first["mask"] == first["sampled"] == [1, 1] and first["reward"] == 1.0 and second["reward"] is None


def test_the_report_finds_new_samples_and_passes_over_nonsense(path: Path, tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    assert samples.refresh() and samples.steps == [0, 4] and not samples.refresh()
    completions, left_out = samples.of_step(4, 10**6)
    assert len(completions) == 2 and not left_out and completions[0]["sampler"] == [0, -125]
    file = RecordFile(path)
    file.append(Record(6, b'{"groups": 3}'))
    file.append(Record(-(2**62), b"[]"))
    file.close()
    assert samples.refresh() and samples.steps == [0, 4, 6] and samples.of_step(6, 10**6) == ([], 0)


def test_a_hostile_record_costs_at_most_its_step(path: Path, tmp_path: Path) -> None:
    draw, whole = random.Random(0), path.read_bytes()
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        samples = Samples(tmp_path)
        samples.refresh()
        assert len(samples.of_step(4, 10**6)[0]) <= 2
    EventLog(tmp_path, pytest.fail).samples(5, [{"tokens": []}])  # a damaged end is dropped

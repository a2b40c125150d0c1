"""The groups that the store keeps for the report: written once, cut when checkpoints make their round needless."""

from __future__ import annotations

import dataclasses
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
from colograd.batch import FinishReason, Group, Logged, ModelInput, Prompt, Rollout, RolloutId, ScoredGroup
from colograd.extensions.recording.group_views import TokenTexts, shown_notes
from colograd.extensions.recording.shown import show
from colograd.rollout.group_records import RewardedGroup
from colograd.rollout.record_file import Record, RecordFile, read_records
from colograd.rollout.store import RolloutStore

TOKENIZER = tiny.make_tokenizer()


def scored(position: int, text: str = "ab") -> ScoredGroup:
    ids = array("i", TOKENIZER.encode(text))
    rollouts = tuple(
        Rollout(ModelInput((1, 2)), ids, -torch.arange(len(ids)) / 8, torch.ones(len(ids), dtype=torch.bool), end, 0)
        for end in (FinishReason.STOP, FinishReason.LENGTH)
    )
    group, rewards = Group({"prompt": f"prompt {position}"}, rollouts, position), torch.tensor([[1.0], [float("nan")]])
    return ScoredGroup(group, rewards, torch.tensor([0.5, -0.5]), Logged({"note": ("x", None)}, {}))


def recorded(group: ScoredGroup) -> RewardedGroup:
    return RewardedGroup(group.group, group.rewards, group.logged)


def notes_on(*groups: ScoredGroup, step: int = 4, purpose: str = "train") -> dict[str, Any]:
    trainer = {RolloutId(group.group.position, 0): torch.full((2,), -0.25) for group in groups}
    judged = [(group, [1.0, float("nan")]) for group in groups]
    return shown_notes(judged, step, purpose, ["right"], trainer, TokenTexts(TOKENIZER), False)


def write(folder: Path, **settings: Any) -> RolloutStore:
    """Write a round of three groups to a store. One of the groups is shown."""
    store = RolloutStore(folder, 0, settings)
    store.begin(3, "weights")
    for position in (5, 6, 7):
        store.add(recorded(scored(position)))
    show(store, notes_on(scored(6)), [recorded(scored(6))])
    store.close()
    assert not store.problem
    return store


def check(entries: list[dict[str, Any]]) -> None:
    assert [(entry["step"], entry["position"], entry["index"]) for entry in entries] == [(4, 6, 0), (4, 6, 1)]
    first, second = entries
    assert first["tokens"] == ["a", "b"] and first["prompt"] == "prompt 6" and first["finish"] == "stop"
    assert first["sampler"] == [0.0, -0.125] and first["trainer"] == [-0.25, -0.25] and second["trainer"] is None
    assert first["rewards"] == {"right": 1.0} and first["extra"] == {"note": "x"} and second["advantage"] == -0.5
    assert first["mask"] == first["sampled"] == [1, 1] and first["reward"] == 1.0


def test_show_prints_a_stored_group_where_completions_are_not_logged(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path)
    assert main(["show", str(tmp_path), "--width", "100"]) == 0
    printed = capsys.readouterr().out
    assert "Step 4" in printed and "prompt 6" in printed and "right" in printed and "note" in printed
    assert main(["show", str(tmp_path), "--step", "3"]) == 2
    assert "step 3 isn't in the log of" in capsys.readouterr().err


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "_journal").rglob("*.*"))


def test_a_shown_group_is_written_once_and_outlives_its_round(tmp_path: Path) -> None:
    store = write(tmp_path)
    (path,) = (tmp_path / "_journal").rglob("*.records")
    assert [record.position for record in read_records(path)] == [-1, 5, 6, 7, -6]
    check(samples_of(tmp_path))
    store.prune(before=4)
    assert files(tmp_path) == ["rank-00000.shown"] and store.rounds() == {} and not store.positions(3)
    check(samples_of(tmp_path))
    store.prune(before=9)
    check(samples_of(tmp_path))


def test_without_a_journal_only_shown_groups_are_written(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, 0, {})
    show(store, notes_on(scored(6)), [recorded(scored(6))])
    show(store, notes_on(scored(6), purpose="eval", step=0), [recorded(scored(6))])
    check([entry for entry in samples_of(tmp_path) if entry["purpose"] == "train"])
    assert {(entry["purpose"], entry["step"]) for entry in samples_of(tmp_path)} == {("train", 4), ("eval", 0)}
    again = RolloutStore(tmp_path, 0, {"other": "settings"})
    assert again.start(0, is_writer=True) == []  # what is shown binds no later run
    again.begin(3, "other weights")
    assert again.recall([]) == {} and not again.warning
    again.close()


def test_a_row_that_user_code_changed_is_recalled(tmp_path: Path) -> None:
    prompt, written = Prompt({"prompt": "hi", "tests": [3]}, ModelInput((1,)), 6), scored(6)
    for store in (RolloutStore(tmp_path, 0, {}), RolloutStore(tmp_path, 0, {})):
        store.begin(3, "weights")
        prompt.example["tests"] = [3]
        if store.recall([prompt]):
            break
        prompt.example["tests"].clear()  # as a subclass of the trainer may do
        group = dataclasses.replace(written.group, example=prompt.example)
        store.add(dataclasses.replace(recorded(written), group=group))
        store.close()
    assert store.recall([prompt])[6].group.example == {"prompt": "hi", "tests": [3]}
    store.close()


def test_a_group_that_another_rank_recorded_is_written_again(tmp_path: Path) -> None:
    """After a restart with fewer ranks, a group that another rank recorded is written again."""
    other = RolloutStore(tmp_path, 1, {})
    other.begin(3, "weights")
    other.add(recorded(scored(6)))
    other.close()
    store = RolloutStore(tmp_path, 0, {})
    store.begin(3, "weights")
    show(store, notes_on(scored(6)), [recorded(scored(6))])
    store.close()
    check(samples_of(tmp_path))


def test_an_evaluation_between_two_steps_of_a_round_leaves_it_open(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, 0, {})
    store.begin(3, "weights")
    store.add(recorded(scored(6)))
    store.begin(3, "weights", "eval")
    show(store, notes_on(scored(6)), [recorded(scored(6))])
    store.close()
    assert files(tmp_path) == ["rank-00000.records"] * 2
    check(samples_of(tmp_path))


def test_a_shown_row_stays_its_own_after_an_evaluation(tmp_path: Path) -> None:
    """The evaluation's rows have the same positions, and a different rank had recorded the group."""
    trained, asked = (Prompt({"prompt": f"{text} 6"}, ModelInput((1, 2)), 6) for text in ("prompt", "question"))
    store = RolloutStore(tmp_path, 0, {})
    store.begin(3, "weights")
    store.recall([trained])
    store.begin(3, "weights", "eval")
    store.recall([asked])
    show(store, notes_on(scored(6)), [recorded(scored(6))])
    store.close()
    store.begin(3, "weights")
    assert [*store.recall([trained])] == [6]
    store.close()


def test_the_report_finds_new_groups_as_the_file_grows_and_passes_over_nonsense(tmp_path: Path) -> None:
    write(tmp_path)
    samples = Samples(tmp_path)
    assert samples.refresh(1) and samples.steps == [4] and not samples.refresh(2)
    completions, left_out = samples.of_step(4, 10**6)
    assert len(completions) == 2 and not left_out and completions[0]["sampler"] == [0, -125]
    (path,) = (tmp_path / "_journal").rglob("*.records")
    file = RecordFile(path)
    file.append(Record(-8, b'{"groups": 3}'))
    file.append(Record(-(2**62), b"[]"))
    file.close()
    assert samples.refresh(3) and samples.steps == [4, 6] and samples.of_step(6, 10**6) == ([], 0)


@pytest.mark.parametrize("hurt", ["notes", "group"])
def test_a_hostile_record_costs_at_most_its_step(tmp_path: Path, hurt: str) -> None:
    write(tmp_path)
    (path,) = (tmp_path / "_journal").rglob("*.records")
    records, draw = list(read_records(path)), random.Random(0)
    at = -1 if hurt == "notes" else 2
    for _ in range(200):
        content = bytearray(records[at].content)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.unlink()
        file = RecordFile(path)
        for index, record in enumerate(records):
            file.append(Record(record.position, bytes(content)) if index == at % len(records) else record)
        file.close()
        samples = Samples(tmp_path)
        samples.refresh(1)
        assert len(samples.of_step(4, 10**6)[0]) <= 2
    RolloutStore(tmp_path, 0, {}).prune(before=9)
    assert files(tmp_path) in ([], ["rank-00000.shown"])

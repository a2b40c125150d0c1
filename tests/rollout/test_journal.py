"""The journal: recorded completions are neither sampled nor scored again, and train to the same bits."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from needs import has

from colograd import GRPOTrainer
from colograd.checkpoint import folders
from colograd.rollout.record_file import RecordFile
from colograd.rollout.store import FOLDER, JournalError, RolloutStore

pytestmark = pytest.mark.engine


class Counting(GRPOTrainer):
    """A trainer that counts sampled and scored completions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sampled: list[int] = []
        super().__init__(*args, **kwargs)

    def generate(self, prompts):
        self.sampled += [prompt.position for prompt in prompts]
        yield from super().generate(prompts)


def train(
    model: Path, folder: Path, resume: Any = None, dataset: Any = None, edited: bool = False, **changes: Any
) -> dict[str, Any]:
    scored = []

    def reward(completions: list[Any], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        scored.extend(completions)
        log_extra("length", [len(c[0]["content"]) for c in completions])
        log_metric("share", 0.5)
        return tiny.vowels(completions)

    function = reward
    if edited:

        def reward(completions: list[Any], **kwargs: Any) -> list[float]:
            scored.extend(completions)
            return [1.0 - value for value in tiny.vowels(completions)]

        function = reward
    settings: dict[str, Any] = {"journal": "keep", "max_steps": 4, **changes}
    config = tiny.config(folder, **settings)
    trainer = Counting(str(model), function, config, dataset or tiny.prompts(), eval_dataset=tiny.prompts(3))
    try:
        trainer.train(resume_from_checkpoint=resume)
        return {
            "sampled": trainer.sampled,
            "scored": len(scored),
            "weights": [p.detach().clone() for p in trainer.model.parameters()],
            "logs": [entry for entry in trainer.state.log_history if "reward" in entry],
        }
    finally:
        trainer.close()


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An undisturbed run and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(tiny_model, folder)


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("step-*/rank-*.records"))


def test_what_is_recorded_is_trained_again_without_sampling_or_scoring(whole, tiny_model, tmp_path) -> None:
    folder, first = whole
    assert len(first["sampled"]) == 16 and first["scored"] == 64 and len(files(folder)) == 4
    shutil.copytree(folder / FOLDER, tmp_path / FOLDER)
    again = train(tiny_model, tmp_path, resume="auto")
    assert again["sampled"] == [] and again["scored"] == 0
    assert same(again["weights"], first["weights"])
    for entry, before in zip(again["logs"], first["logs"], strict=True):
        for name in ("loss", "reward", "completions/mean_length", "rewards/reward/std", "share"):
            assert entry[name] == before[name], name


@pytest.mark.slow
def test_evaluations_in_between_are_neither_sampled_nor_scored_again(tiny_model, tmp_path) -> None:
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    first = train(tiny_model, tmp_path, **settings)
    assert len(first["sampled"]) == 2 * (4 + 3) and first["scored"] == 2 * (16 + 6)
    again = train(tiny_model, tmp_path, resume="auto", **settings)
    assert again["sampled"] == [] and again["scored"] == 0 and same(again["weights"], first["weights"])


def test_no_push_takes_it_along() -> None:
    """transformers ignores files with a leading underscore in an upload."""
    source = inspect.getsource(transformers.Trainer.push_to_hub)
    assert 'ignore_patterns=["_*", ' in source and FOLDER.startswith("_") and folders.EARLIER.startswith("_")


@pytest.mark.slow  # test_stopping.py has one that a signal cuts
def test_an_interrupted_round_samples_only_its_missing_groups(whole, tiny_model, tmp_path) -> None:
    folder, first = whole
    shutil.copytree(folder / FOLDER, tmp_path / FOLDER)
    shutil.rmtree(files(tmp_path)[3].parent)
    torn = files(tmp_path)[2]
    torn.write_bytes(torn.read_bytes()[:-7])
    again = train(tiny_model, tmp_path, resume="auto")
    assert len(again["sampled"]) == 5 and again["scored"] == 20, "a group of the third round, and the fourth"
    # Some processors' kernels round a group that is sampled alone otherwise than among others, in the last bit.
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(again["weights"], first["weights"], strict=True))
    assert again["logs"][-1]["reward"] == first["logs"][-1]["reward"]
    assert train(tiny_model, tmp_path, resume="auto")["sampled"] == [], "what was cut is whole again"


@pytest.mark.slow
def test_a_recipe_s_other_settings_hold_from_the_checkpoint_on(whole, tiny_model, tmp_path, capfd) -> None:
    """Recorded rounds are reused if this run would sample them with equal weights. Later rounds are moved aside."""
    shutil.copytree(whole[0] / FOLDER, tmp_path / FOLDER)
    again = train(tiny_model, tmp_path, resume="auto", learning_rate=2e-3)
    assert len(again["sampled"]) == 12, "the first round's samples don't depend on the rate, the others' weights do"
    assert not same(again["weights"], whole[1]["weights"])
    assert (
        "3 round(s) or evaluations from step 0 on were recorded with other settings (learning_rate"
        in capfd.readouterr().out
    )
    assert len(train(tiny_model, tmp_path, resume="auto", learning_rate=2e-3, seed=8)["sampled"]) == 16
    moved = [path.parent.name for path in (tmp_path / folders.EARLIER).glob("*/_journal/step-*/rank-*.records")]
    assert sorted(moved) == [f"step-{step:08d}" for step in (0, 1, 1, 2, 2, 3, 3)], "nothing is lost"


def test_an_edited_reward_is_noticed_and_rescore_keeps_the_samples(whole, tiny_model, tmp_path) -> None:
    shutil.copytree(whole[0] / FOLDER, tmp_path / FOLDER)
    with pytest.raises(
        JournalError, match=r"functions changed \(reward\): set `rescore: true` .* set `journal: off` to sample anew"
    ):
        train(tiny_model, tmp_path, resume="auto", edited=True)
    again = train(tiny_model, tmp_path, resume="auto", edited=True, rescore=True)
    assert len(again["sampled"]) == 12 and again["scored"] == 64, "the first round is scored again"
    fresh = train(tiny_model, tmp_path / "fresh", edited=True)
    assert same(again["weights"], fresh["weights"]), "as if the new function had been there from the beginning"
    resumed = train(tiny_model, tmp_path, resume="auto", edited=True)
    assert resumed["sampled"] == [] and resumed["scored"] == 0 and same(resumed["weights"], fresh["weights"])


def test_a_start_that_failed_before_its_first_group_binds_nobody(tmp_path) -> None:
    failed = RolloutStore(tmp_path, 0, {"num_generations": 8})
    failed.begin(0, "weights")
    failed.close()
    again = RolloutStore(tmp_path, 0, {"num_generations": 4})
    assert again.start(0, is_writer=True) == []
    again.begin(0, "weights")
    assert not again.positions(0)
    again.close()
    assert again.recorded_settings() == {"num_generations": 4} and not again.problem


def test_other_weights_and_other_data_are_errors(whole, tiny_model, tiny_qwen, tmp_path) -> None:
    shutil.copytree(whole[0] / FOLDER, tmp_path / FOLDER)
    with pytest.raises(JournalError, match=r"weights other than this run's sampled at step 0: .*journal: off"):
        train(tiny_qwen, tmp_path, resume="auto")
    rows = tiny.prompts().map(lambda row: {"answer": row["answer"] + "!"})
    with pytest.raises(JournalError, match="is of another prompt, because the dataset or its order"):
        train(tiny_model, tmp_path, resume="auto", dataset=rows)


def test_a_fresh_start_moves_an_earlier_run_s_files_aside(whole, tiny_model, tmp_path, capfd, monkeypatch) -> None:
    """An error in the last round's records is reported, although no further round begins."""

    def full(self: RecordFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordFile, "flush", full)
    shutil.copytree(whole[0] / FOLDER, tmp_path / FOLDER)
    earlier = [tmp_path / name for name in ("completions/completions_00009.parquet", "checkpoint-9/x", "README.md")]
    for path in (*earlier, tmp_path / "config.json", tmp_path / "mine.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert len(train(tiny_model, tmp_path, max_steps=1)["sampled"]) == 4
    said = capfd.readouterr().out
    assert "an earlier run's files in" in said and (tmp_path / "mine.py").is_file()
    assert not any(path.exists() for path in (*earlier, tmp_path / "config.json")), "a run's, which no other mixes with"
    (aside,) = (tmp_path / folders.EARLIER).iterdir()
    assert all((aside / path.relative_to(tmp_path)).is_file() for path in earlier)
    assert said.count("records can't be written (OSError: [Errno 28] No space left on device)") == 1
    assert len(files(tmp_path)) == 1 and len(list((aside / FOLDER).glob("step-*"))) == 4


def test_checkpoints_make_rounds_needless(tiny_model, tmp_path) -> None:
    settings = {"journal": None, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    first = train(tiny_model, tmp_path, **settings)
    assert [path.parent.name for path in files(tmp_path)] == ["step-00000003"]
    if has("recording"):
        shown = importlib.import_module("shown_rows").samples_of(tmp_path)
        assert {entry["step"] for entry in shown} == {1, 2, 3, 4}, "the report keeps its groups"
        assert all(entry["tokens"] and entry["trainer"] and entry["extra"] for entry in shown)
    shutil.rmtree(tmp_path / "checkpoint-4")
    again = train(tiny_model, tmp_path, resume="auto", **settings)
    assert again["sampled"] == [] and same(again["weights"], first["weights"])
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4

"""SIGKILL at any moment: the resumed run goes on from the last whole checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import launcher
import pytest
import tiny
import torch
from datasets import IterableDataset
from paths import SCRIPTS

from colograd import GRPOTrainer

pytestmark = pytest.mark.engine

SCRIPT = SCRIPTS / "record.py"


def run(model: Path, run_dir: Path, record: Path, kill_at: str = "never") -> int:
    done = launcher.run(SCRIPT, model, run_dir, record, kill_at)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def steps(record: Path) -> dict[int, dict]:
    """Return each step's last record."""
    return {line["step"]: line for line in map(json.loads, record.read_text().splitlines())}


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict], bytes]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run(tiny_model, folder / "run", folder / "record.jsonl") == 0
    return steps(folder / "record.jsonl"), (folder / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("moment", "resumes_from"),
    [("rename:4", 2)]
    + [
        pytest.param(moment, step, marks=pytest.mark.slow)
        for moment, step in (("model:4", 2), ("renamed:4", 4), ("backward:5", 4), ("rollout:1", 0), ("rollout:4", 2))
    ],
)
def test_a_killed_run_resumes_bit_for_bit(tiny_model, tmp_path, uninterrupted, moment, resumes_from) -> None:
    """Same completions, bit-equal losses, the same learning rates and the same final weights."""
    run_dir, record = tmp_path / "run", tmp_path / "record.jsonl"
    assert run(tiny_model, run_dir, record, moment) == -signal.SIGKILL
    whole = sorted(int(path.name.rpartition("-")[2]) for path in run_dir.glob("checkpoint-*"))
    assert max(whole, default=0) == resumes_from, "only whole checkpoints are there"
    taken = len(record.read_text().splitlines()) if record.exists() else 0
    assert run(tiny_model, run_dir, record) == 0
    resumed = [json.loads(line)["step"] for line in record.read_text().splitlines()[taken:]]
    assert resumed == list(range(resumes_from + 1, 7))
    expected, weights = uninterrupted
    assert steps(record) == expected
    assert (run_dir / "model.safetensors").read_bytes() == weights
    assert not list(run_dir.glob(".*")), "what the kill left behind is swept up"


def test_a_streamed_run_resumes_bit_for_bit(tiny_model, tmp_path, closing) -> None:
    """Optimizer and scheduler are restored when a finished run is resumed, too."""
    rows = tiny.prompts(11)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    args = tiny.config(tmp_path, prompts_per_step=2, max_steps=4, save_strategy="steps", save_steps=2)
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, args, stream))

    def weights() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()

    trainer.train()
    expected = weights()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4 and torch.equal(weights(), expected)

    trainer.optimizer = trainer.lr_scheduler = None
    done = trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert done.global_step == 4 and torch.equal(weights(), expected)
    saved = tiny.optimizer_state(tmp_path / "checkpoint-4")
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    held = {names[id(parameter)]: state["exp_avg"] for parameter, state in trainer.checkpointer.optimizer.state.items()}
    assert held.keys() == saved.keys() and len(held) > 10
    assert all(torch.equal(held[name].flatten(), saved[name]["exp_avg"]) for name in held)
    assert trainer.lr_scheduler.last_epoch == 4

    trainer.train_prompts.dataset = IterableDataset.from_generator(lambda: iter(rows.select(range(10, -1, -1))))
    with pytest.raises(ValueError, match="train isn't the stream that the checkpoint was trained on"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name in ("prompts.json", "manifest.json"):
        (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.raises(ValueError, match="is from a run whose dataset wasn't streamed"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

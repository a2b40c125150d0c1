"""A user's rollout source: completions from a file. Only this file knows the source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, Prompt, Rollout

END = tiny.make_tokenizer().eos_token_id


class FileSource:
    """Reads each prompt's completions, with their log-probabilities, from JSON lines; see `RolloutSource`."""

    path: Path

    def __init__(self, engine: Any) -> None:
        lines = self.path.read_text().splitlines()
        self.groups = {entry["position"]: entry["completions"] for entry in map(json.loads, lines)}

    def generate(
        self, prompts: Sequence[Prompt], sampling: Any, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        for prompt in prompts:
            rollouts = [
                Rollout(
                    input=prompt.input,
                    completion_ids=tuple(completion["ids"]),
                    sampler_logprobs=torch.tensor(completion["logprobs"]),
                    sampled=torch.ones(len(completion["ids"]), dtype=torch.bool),
                    finish_reason=FinishReason.STOP,
                    policy_version=version,
                )
                for completion in self.groups[prompt.position]
            ]
            yield Group(prompt.example, tuple(rollouts), prompt.position)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[int]]]:
    """Completions of 8 prompts with 4 each; they are in the file that `FileSource` reads."""
    draw = torch.Generator().manual_seed(0)
    completions = {
        position: [[*torch.randint(200, (3 + index,), generator=draw).tolist(), END] for index in range(4)]
        for position in range(8)
    }
    monkeypatch.setattr(FileSource, "path", tmp_path / "completions.jsonl", raising=False)
    with FileSource.path.open("w") as file:
        for position, of_group in completions.items():
            entries = [{"ids": ids, "logprobs": [-5.0] * len(ids)} for ids in of_group]
            file.write(json.dumps({"position": position, "completions": entries}) + "\n")
    return completions


@pytest.mark.engine
@pytest.mark.parametrize("given", [FileSource, f"{__name__}:FileSource"], ids=["class", "import path"])
def test_a_run_trains_on_the_completions_of_a_file(given, recorded, tiny_model, tmp_path, closing) -> None:
    config = tiny.config(tmp_path / "run", max_steps=2, vllm_importance_sampling_correction=False)
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts(), rollout_func=given))
    trained: list[Any] = []
    step = trainer.training_step
    trainer.training_step = lambda model, batch, *a: trained.append(batch) or step(model, batch, *a)
    trainer.train()
    seen = {
        scored.group.position: [list(rollout.completion_ids) for rollout in scored.group.rollouts]
        for batch in trained
        for scored in batch.groups
    }
    assert seen == recorded
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)

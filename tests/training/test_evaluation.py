"""Evaluation with the real engine: what is sampled and reported, and the best model by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import IterableDataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from colograd import GRPOTrainer
from colograd.training.evaluation import count_passes, pass_at

pytestmark = pytest.mark.engine


class Looking(GRPOTrainer):
    """A trainer that keeps the groups of an evaluation."""

    def generate(self, prompts):
        for group in super().generate(prompts):
            if self.evaluating:
                self.seen.append(group)
            yield group


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of three steps that evaluates and saves after each, and loads the best."""
    Looking.seen = []
    args = tiny.config(
        tmp_path_factory.mktemp("run"),
        max_steps=3,
        learning_rate=2e-3,
        num_generations_eval=4,
        pass_threshold_eval=0.55,
        loss_eval=True,
        beta=0.01,
        scale_rewards="batch",
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="pass@2",
    )
    trainer = Looking(str(tiny_model), tiny.vowels, args, tiny.prompts(), tiny.prompts(6))
    trainer.train()
    yield trainer
    trainer.close()


def test_pass_at_k_and_the_mean_are_those_of_what_was_sampled(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained.seen.clear()
    metrics = trained.evaluate()
    rewards = [torch.tensor(tiny.vowels(trained.decode(group))) for group in trained.seen]
    assert len(rewards) == 6 and all(len(of_group) == 4 for of_group in rewards)
    assert metrics["eval_reward"] == pytest.approx(float(torch.cat(rewards).mean()), abs=1e-6)
    assert (metrics["eval_completions"], metrics["eval_runtime"] > 0) == (24, True)
    threshold = float(torch.cat(rewards).median())  # about half of the completions pass
    monkeypatch.setattr(trained.args, "pass_threshold_eval", threshold)
    metrics = trained.evaluate()
    expected = pass_at([count_passes(of_group, threshold) for of_group in rewards], 4)
    assert {name: metrics[f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert 0 < metrics["eval_pass@1"] < metrics["eval_pass@2"] < metrics["eval_pass@4"]


def test_the_forward_that_was_asked_for_has_trls_metrics_and_no_gradient(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.seen.clear()
    metrics = trained.evaluate()
    assert metrics["eval_entropy"] > 0
    # On-policy the ratios are 1: minus the mean over tokens of the advantages, and the reference's term.
    rewards = torch.stack([torch.tensor(tiny.vowels(trained.decode(group))) for group in trained.seen])
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std() + 1e-4)
    lengths = torch.tensor([[len(r.completion_ids) for r in group.rollouts] for group in trained.seen])
    expected = -float((advantages * lengths).sum() / lengths.sum()) + 0.01 * metrics.get("eval_kl", 0.0)
    assert metrics["eval_loss"] == pytest.approx(expected, abs=1e-4)
    assert metrics["eval_sampling/sampling_logp_difference/mean"] < 1e-4
    assert all(p.grad is None or not p.grad.any() for p in trained.model.parameters())
    monkeypatch.setattr(trained.args, "loss_eval", False)
    assert not {"eval_loss", "eval_entropy"} & trained.evaluate().keys()


def test_the_best_model_is_the_one_with_the_best_pass_at_k(trained: Any) -> None:
    found = {e["step"]: e["eval_pass@2"] for e in trained.state.log_history if "eval_pass@2" in e and e["step"]}
    best = max(found, key=lambda step: found[step])
    assert len(found) == 3 and Path(trained.state.best_model_checkpoint).name == f"checkpoint-{best}"
    weights = load_file(Path(trained.state.best_model_checkpoint) / "model.safetensors")
    held = dict(trained.model.named_parameters())
    assert all(torch.equal(weights[name], held[name]) for name in weights)


def test_datasets_by_name_streamed_or_in_a_dict(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tiny.prompts(3)
    parts = {"a": rows, "b": IterableDataset.from_generator(lambda: iter(rows))}
    named = trained.evaluate(parts)
    assert named["eval_a_reward"] == named["eval_b_reward"] and named["eval_a_completions"] == 12
    monkeypatch.setattr(trained, "eval_prompts", {"some": trained.eval_prompts})
    assert {"eval_reward", "eval_pass@4"} <= trained.evaluate("some").keys()
    assert "eval_some_reward" in trained.evaluate()


def test_a_prediction_is_an_evaluation_under_another_name(trained: Any) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            seen.append(metrics)

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("it is none")

    look = Look()
    trained.add_callback(look)
    found = trained.predict(tiny.prompts(6))
    trained.remove_callback(look)
    assert (found.predictions, found.label_ids, seen) == (None, None, [found.metrics])
    expected = trained.evaluate()
    assert found.metrics["test_reward"] == expected["eval_reward"]
    assert {name.removeprefix("test_") for name in found.metrics} == {
        name.removeprefix("eval_")
        for name in expected.keys() - {"epoch"}  # which logging adds
    }


def test_the_trainers_datasets_are_datasets(trained: Any) -> None:
    assert trained.train_dataset[0] == tiny.prompts()[0] and trained.train_dataset[2:4]["answer"] == ["c", "d"]
    rows = [row for batch in trained.get_eval_dataloader() for row in batch]
    assert rows == list(tiny.prompts(6))
    again = trained.evaluate({"some": trained.eval_dataset})
    assert again["eval_some_reward"] == trained.evaluate(trained.eval_dataset)["eval_reward"]


def test_greedy_evaluation_is_one_completion_each_and_always_the_same(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"temperature_eval": 0, "num_generations_eval": None, "loss_eval": False, "max_completion_length_eval": 5}
    for name, value in changes.items():
        monkeypatch.setattr(trained.args, name, value)
    first, second = trained.evaluate(), trained.evaluate()
    assert first["eval_completions"] == 6 and first["eval_completions/max_length"] <= 5
    assert first["eval_reward"] == second["eval_reward"]
    assert {name for name in first if "pass@" in name} == {"eval_pass@1"}

"""The metric of the best model: a misspelt one is an error at start, a missing one a warning."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from transformers import TrainerCallback

from colograd import GRPOTrainer
from colograd.extensions.best_model.metric import check_best_metric, lacks_best
from colograd.rewards import resolve_rewards

PROMPTS: Any = object()


def plain(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def logs(completions: list[Any], log_metric: Any, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def passes_on(completions: list[Any], **kwargs: Any) -> list[float]:
    return logs(completions, **kwargs)


def check(name: str, function: Any = plain, prompts: Any = PROMPTS, others: bool = False, **changes: Any) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 4, **changes}
    args = tiny.config(Path("unused"), metric_for_best_model=name, **settings)
    check_best_metric(args, resolve_rewards([function], None), prompts, others)


@pytest.mark.parametrize(
    "name",
    ["reward", "eval_reward", "rewards/plain/mean", "rewards/plain/abstained", "pass@4", "completions/mean_length"]
    + ["loss", "kl", "entropy", "runtime", "sampling/raw_ratio/max", "tools/failures"],
)
def test_a_metric_of_evaluations_is_taken(name: str) -> None:
    check(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [("rewrd", "reward"), ("eval_rewrad", "reward"), ("rewards/plane/mean", "rewards/plain/mean"), ("pass@3", "pass@")],
)
def test_a_misspelt_metric_is_refused_at_start(name: str, near: str) -> None:
    said = f"metric_for_best_model is '{name}', but no evaluation .*reward, .*the nearest is '{near}"
    with pytest.raises(ValueError, match=said):
        check(name)
    check(name, eval_strategy="no")
    check(name, others=True)
    check(name, logs)
    check(name, passes_on)
    check(name, functools.partial(passes_on))


def test_each_dataset_has_its_own_metrics() -> None:
    parts = {"math": PROMPTS, "code": PROMPTS}
    check("math_reward", prompts=parts)
    with pytest.raises(ValueError, match="the nearest is 'math_reward'"):
        check("reward", prompts=parts)


def test_a_missing_metric_is_warned_of() -> None:
    args: Any = SimpleNamespace(metric_for_best_model="reward")
    assert lacks_best(args, {"eval_reward": 1.0}, earlier=False) == ""
    assert "it has no eval_reward" in lacks_best(args, {"eval_completions": 4.0}, earlier=False)
    args.metric_for_best_model = "kl"
    assert "it has no eval_kl" in lacks_best(args, {}, earlier=True)
    with pytest.raises(ValueError, match=r"'kl', but the evaluation has no .* the nearest is 'eval_k2'"):
        lacks_best(args, {"eval_reward": 4.0, "eval_k2": 1.0}, earlier=False)


@pytest.mark.engine
def test_an_evaluation_without_rewards_ends_no_run(tiny_model: Path, tmp_path: Path) -> None:
    judged = {0: 0.5, 1: None, 2: 0.25, 3: None}
    evaluates = []

    def reward(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[Any]:
        return [judged[trainer_state.global_step]] * len(completions) if evaluates else tiny.vowels(completions)

    class Evaluating(GRPOTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            evaluates.append(True)
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                evaluates.clear()

    class Steps(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            seen.append(metrics.get("eval_reward"))

    seen: list[Any] = []
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"load_best_model_at_end": True, "eval_on_start": True, "lr_scheduler_type": "reduce_lr_on_plateau"}
    args = tiny.config(tmp_path, max_steps=3, loss_eval=False, **settings)
    trainer = Evaluating(str(tiny_model), reward, args, tiny.prompts(), tiny.prompts(2), callbacks=[Steps()])
    try:
        trainer.train()
        assert seen == [0.5, None, 0.25, None]
        assert Path(str(trainer.state.best_model_checkpoint)).name == "checkpoint-2"
    finally:
        trainer.close()

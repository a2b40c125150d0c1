"""Logs of reward functions: TRL's `log_extra` and `log_metric`, from every place where a function may run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny
import torch
from needs import needs
from reward_cases import (
    bare,
    dead,
    failing,
    late,
    presumptuous,
    short,
    talkative,
    talkative_too,
    unbounded,
    worded,
)  # fmt: skip

from colograd import GRPOTrainer
from colograd.apps.cli import main
from colograd.batch import FinishReason, Group, Logged, ModelInput, Rollout, ScoredGroup
from colograd.rewards import RewardError, Scorer
from colograd.rollout.statistics import RolloutStatistics
from colograd.runtime import registry
from colograd.usercode.worker_process import CallLog


def make_group(size: int = 3, position: int = 17) -> Group:
    rollout = Rollout(ModelInput((1, 2)), (3,), torch.zeros(1), torch.ones(1, dtype=torch.bool), FinishReason.STOP, 0)
    return Group({"prompt": "2 + 2 ="}, (rollout,) * size, position)


def score(scorer: Scorer, *groups: Group) -> torch.Tensor:
    groups = groups or (make_group(),)
    texts = [[f"{group.position}.{i}" for i in range(len(group.rollouts))] for group in groups]
    return scorer.submit(groups, texts).result()


@pytest.mark.parametrize(("function", "workers"), [(talkative, 0), (talkative, 1), (talkative_too, 0)])
def test_what_is_logged_comes_with_the_rewards(scorer_of, function: Any, workers: int) -> None:
    scorer = scorer_of(function, workers=workers)
    assert score(scorer).tolist() == [[1.0]] * 3
    logged = scorer.take_logged(17)
    assert logged.columns == {"answer": ("17.0", "17.1", "17.2"), "length": (4, 4, 4)}
    assert logged.metrics == {"share": (1.0, 2), "calls": (1.0, 1)}
    assert scorer.take_logged(17) == Logged({}, {}), "once"


def test_tensors_are_logged_as_numbers() -> None:
    log = CallLog()
    log.extra("each", torch.tensor([1.5, 2.5]))
    log.extra("list", [torch.tensor(3), None])
    log.metric("mean", torch.tensor(0.75, requires_grad=True))
    assert (log.columns, log.metrics) == ({"each": [1.5, 2.5], "list": [3, None]}, {"mean": [0.75]})


def test_token_weights_need_their_extension(scorer_of, monkeypatch: pytest.MonkeyPatch) -> None:
    def weighing(completions: list[Any], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("token_weights", [None] * len(completions))
        return [1.0] * len(completions)

    monkeypatch.setattr(registry, "installed", lambda: ())
    with pytest.raises(ValueError, match="token_weights, which weighing logs, needs the extension `token_weights`"):
        score(scorer_of(weighing))


@pytest.mark.parametrize("workers", [0, 1])
def test_one_call_for_several_groups_logs_each_completion_in_its_own(scorer_of, workers: int) -> None:
    scorer = scorer_of(talkative, workers=workers)
    score(scorer, make_group(2, 5), make_group(1, 3))
    first, second = scorer.take_logged(5), scorer.take_logged(3)
    assert (first.columns["answer"], second.columns["answer"]) == (("5.0", "5.1"), ("3.0",))
    assert first.metrics["calls"] == (1.0, 1) and not second.metrics, "a metric is of the call"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_invalid_log_call_names_its_function(scorer_of, workers: int) -> None:
    said = {
        short: "the function logged 2 values in the column 'answer' for 3 completions",
        bare: r"log_extra\('answer', ...\) got 'text' \(str\), but takes a list with one value per completion",
        worded: r"log_metric\('share', ...\) got 'a lot' \(str\), but takes a finite number",
        unbounded: r"log_metric\('share', ...\) got nan \(float\), but takes a finite number",
        presumptuous: "the function logged the metric 'completions/mean_length', a name of the trainer's metrics",
    }
    scorer = scorer_of(*said, workers=workers, on_error="abstain")
    assert score(scorer).isnan().all() and scorer.take_logged(17) == Logged({}, {})
    scorer.on_error = "raise"
    rewards = scorer.rewards
    for reward, (function, message) in zip(rewards, said.items(), strict=True):
        scorer.rewards = [reward]
        with pytest.raises(RewardError, match=message) as caught:
            score(scorer)
        assert repr(function.__name__) in str(caught.value)
    assert not scorer.logged


def test_two_functions_cannot_log_the_same_column(scorer_of) -> None:
    with pytest.raises(RewardError, match=r"'talkative_2', .*the function logged the column '.*', as another"):
        score(scorer_of(talkative, talkative))


@pytest.mark.parametrize("function", [failing, late, dead])
def test_a_call_that_gives_no_rewards_leaves_nothing_half_logged(scorer_of, function: Any) -> None:
    timeout = 0.5 if function is late else None
    scorer = scorer_of(function, workers=1, timeout=timeout, on_error="abstain")
    assert score(scorer).isnan().all() and scorer.take_logged(17) == Logged({}, {})


def test_metrics_are_means_over_all_values_of_all_ranks() -> None:
    def rank(*metrics: dict[str, tuple[float, int]]) -> RolloutStatistics:
        groups = [ScoredGroup(make_group(2), torch.ones(2, 1), torch.zeros(2), Logged({}, m)) for m in metrics]
        return RolloutStatistics.of(groups, lambda rewards: rewards[:, 0], False)

    whole = RolloutStatistics.join([rank({"share": (1.0, 2)}, {"share": (0.2, 1), "other": (5.0, 1)}), rank({}, {})])
    assert whole.metrics(["f"])["share"] == pytest.approx(0.4) and whole.metrics(["f"])["other"] == 5.0
    assert whole.metrics(["f"])["reward"] == 1.0


@needs("recording")
def test_logged_columns_stay_with_their_completions_in_every_log(tmp_path: Path, capsys) -> None:
    from colograd.extensions.recording.completions import columns, read_log, write_log
    from colograd.extensions.recording.group_views import completion_rows

    def group(position: int, **logged: Any) -> ScoredGroup:
        return ScoredGroup(make_group(2, position), torch.ones(2, 1), torch.zeros(2), Logged(logged, {}))

    mixed = group(1, answer=("a", "b"), f=(1, 2), mixed=(1, "two"), nested=([1], None))
    rows = completion_rows([mixed, group(2, answer=("c", None))], [[b"x", b"y"]] * 2, 1)
    path = write_log(tmp_path, rows, ["f"], 1)
    table = pq.read_table(path).to_pydict()
    assert table["answer"] == ["a", "b", "c", None] and table["f"] == [1.0] * 4
    assert table["extra/f"] == [1, 2, None, None], "a name that a column has already"
    assert table["mixed"] == ["1", "two", None, None], "no type for them all: texts"
    assert columns(rows, ["f"])["nested"] == [[1], None, None, None], "trackers get the same"
    found, names = read_log(path)
    assert names == ["f"] and [row.extra["answer"] for row in found] == ["a", "b", "c", None]
    assert found[1].extra["f"] == 2
    assert main(["show", str(tmp_path)]) == 0
    assert "answer" in (shown := capsys.readouterr().out) and "two" in shown


@needs("recording")
@pytest.mark.engine
def test_a_run_logs_them_and_an_evaluation_too(tiny_model: Path, tmp_path: Path, closing) -> None:
    from colograd.extensions.recording.completions import read_log

    def judge(completions: list[Any], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        log_extra("shouted", [c[0]["content"].upper() for c in completions])
        log_metric("judged", len(completions))
        return tiny.vowels(completions)

    config = tiny.config(tmp_path, max_steps=1, log_completions=True, num_generations_eval=2)
    trainer = closing(GRPOTrainer(str(tiny_model), judge, config, tiny.prompts(), tiny.prompts(3)))
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    assert entry["judged"] == 4.0
    rows, _ = read_log(tmp_path / "completions" / "completions_00001.parquet")
    assert len(rows) == 16 and all(row.extra == {"shouted": row.completion.upper()} for row in rows)
    assert trainer.evaluate()["eval_judged"] == 2.0

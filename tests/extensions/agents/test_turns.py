"""Reward functions that return a number for each answer of an agent's session. No engine."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_cases import per_answer

from colograd.batch import FinishReason, Group, ModelInput, Prompt, Rollout
from colograd.extensions.agents.turn_rewards import JUDGED, Judging, checked_turns, with_turn_rewards
from colograd.losses.advantages import AdvantageEstimator
from colograd.rewards import RewardError, Scorer
from colograd.rollout.stages import InScoring, Stages
from colograd.rollout.store import RolloutStore

ANSWERS = ((2, 1), (3,), ())  # tokens of each session's answers; behind each the program writes a token


def session(tokens: tuple[int, ...], **columns: Any) -> Rollout:
    answers, sampled = [], list[bool]()
    for count in tokens:
        answers.append({"at": len(sampled), "tokens": count, "reply": {"content": "so"}})
        sampled += [*[True] * count, False]
    sampled = sampled or [False]
    return Rollout(
        ModelInput((1, 2)), array("i", range(len(sampled))), torch.zeros(len(sampled)), torch.tensor(sampled),
        FinishReason.STOP, 0, columns={"session": answers, **columns},
    )  # fmt: skip


def group(**columns: Any) -> Group:
    return Group({"prompt": "so"}, tuple(session(tokens, **columns) for tokens in ANSWERS), 5)


def judging(scorer: Scorer, groups: Sequence[Group]) -> Judging:
    scorer.check = checked_turns
    begin = lambda whole: scorer.submit(whole, [["so"] * len(of.rollouts) for of in whole])  # noqa: E731
    return Judging(begin, len(scorer.rewards), groups)


def score(scorer: Scorer, of: Group) -> torch.Tensor:
    return judging(scorer, [of]).result()


@pytest.mark.parametrize("workers", [0, 1])
def test_they_come_with_the_group_and_their_mean_is_the_sessions_reward(scorer_of: Any, workers: int) -> None:
    scorer = scorer_of(per_answer, workers=workers)
    judged = group()
    rewards = score(scorer, judged)
    assert rewards[:2, 0].tolist() == [0.5, 0.0] and rewards[2].isnan()
    assert [rollout.columns[JUDGED] for rollout in judged.rollouts] == [
        {"per_answer": [0.0, 1.0]}, {"per_answer": [0.0]}, {"per_answer": []},
    ]  # fmt: skip
    scorer.check = lambda reward, groups, values: [0.0] * 3
    Judging(lambda whole: scorer.submit(whole, [["so"] * 3]), 1, [judged]).result()
    assert judged.rollouts[0].columns.keys() == {"session"}, "older ones go"


def test_an_answers_tokens_get_its_advantage_by_all_who_rewarded_it() -> None:
    estimator = AdvantageEstimator("none", "sum_then_normalize", "mean", (1.0, 2.0))
    rewarded = group()
    columns = [{"turn_rewards": [1.0, 0.0], JUDGED: {"second": [0.0, 1.0]}}, {JUDGED: {"second": [4.5]}}, {}]
    rollouts = tuple(session(tokens, **own) for tokens, own in zip(ANSWERS, columns, strict=True))
    given = torch.tensor([10.0, 20.0, 30.0])
    found = with_turn_rewards(given, Group(rewarded.example, rollouts, 5), estimator, {"first": 1.0, "second": 2.0})
    # The answers' rewards are 1, 2 * 1 and 2 * 4.5: mean 4. The program's tokens get the session's advantage.
    assert found.tolist() == [7, 7, 10, 8, 10, 25, 25, 25, 20, 30]
    assert torch.equal(with_turn_rewards(given, rewarded, estimator, {}), given)


def test_they_are_journaled_and_taken_from_there(scorer_of: Any, tmp_path: Path) -> None:
    settings = {"reward_funcs": ["per_answer"]}
    scorer, prompt = scorer_of(per_answer), Prompt({"prompt": "so"}, (1, 2), 5)
    store = RolloutStore(tmp_path, 0, settings)
    store.begin(0, "weights")
    begin: Any = functools.partial(judging, scorer)
    stages = Stages(iter, begin, scorer.submit, scorer.take_logged, store)
    scoring = InScoring(stages, [])
    scoring.take(group())
    (recorded,) = scoring.rewarded.values()
    store.close()
    again = RolloutStore(tmp_path, 0, settings)
    again.begin(0, "weights")
    (recalled,) = again.recall([prompt]).values()
    again.close()
    assert [r.columns for r in recalled.group.rollouts] == [r.columns for r in recorded.group.rollouts]
    assert recalled.group.rollouts[0].columns[JUDGED] == {"per_answer": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("values", "of", "said"),
    [
        (
            [[1.0], 0.0, 0.0],
            group(),
            r"completion 0: its turn rewards are \[1.0\], but must be .* each of the 2 answers",
        ),
        ([0.0, [None], 0.0], group(), r"completion 1: its turn rewards are \[None\], but must be a list of finite"),
        ([[0.0, float("nan")], 0.0, 0.0], group(), r"completion 0: .*nan"),
        (np.ones((3, 2)), group(), r"completion 1: .*each of the 1 answers"),
    ],
)
def test_others_are_refused(scorer_of: Any, values: Any, of: Group, said: str) -> None:
    def returns(**kwargs: Any) -> Any:
        return values

    with pytest.raises(RewardError, match=said):
        score(scorer_of(returns), of)


def test_what_is_no_session_has_one_reward(scorer_of: Any) -> None:
    plain = Group({"prompt": "so"}, (Rollout(ModelInput((1,)), array("i", [1]), torch.zeros(1), torch.ones(1).bool(),
                                             FinishReason.STOP, 0),), 5)  # fmt: skip

    def returns(**kwargs: Any) -> Any:
        return [[1.0]]

    with pytest.raises(RewardError, match=r"only an agent's session can have .* one number per completion"):
        score(scorer_of(returns), plain)

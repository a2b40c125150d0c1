"""Prompts are drawn by their past rewards: coverage, rest, shares, difficulty; the same on any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from datasets import Dataset

from colograd.data.loading import load_datasets
from colograd.extensions.curriculum.curriculum import CurriculumOrder
from colograd.extensions.curriculum.settings import Curriculum, Schedule

PER_STEP = 4


def state(rows: int = 12, shuffle: bool = True, columns: dict[str, list[Any]] | None = None, **given: Any) -> Any:
    config: Any = SimpleNamespace(
        prompts_per_step=PER_STEP,
        steps_per_generation=1,
        seed=3,
        data_seed=None,
        shuffle_dataset=shuffle,
        round_length=1,
        num_iterations=1,
        layout=SimpleNamespace(data_rank=0, data_size=1),
    )
    dataset = Dataset.from_dict({"prompt": [str(row) for row in range(rows)], **(columns or {})})
    return CurriculumOrder.by(Curriculum.of(given), dataset, config)


def draw(made: Any, rounds: int, rate: Any = lambda row: 0.5, first: int = 0) -> list[list[int]]:
    """Draw rounds one after the other, each followed by its pass rates."""
    found = []
    for number in range(first, first + rounds):
        rows = made.choose(number)
        found.append(rows)
        made.record([(number * PER_STEP + place, rate(row)) for place, row in enumerate(rows)])
    return found


def joined(rounds: list[list[int]]) -> list[int]:
    return [row for rows in rounds for row in rows]


def test_without_anything_solved_each_prompt_comes_once_before_any_comes_twice() -> None:
    for shuffle in (True, False):
        rounds = draw(state(shuffle=shuffle), 6)
        assert sorted(joined(rounds[:3])) == sorted(joined(rounds[3:])) == list(range(12))
    assert rounds[0] == [0, 1, 2, 3], "in the dataset's order where it isn't shuffled"


def test_a_solved_prompt_rests_and_comes_again() -> None:
    made = state(revisit_after=2)  # epochs of three rounds
    rounds = draw(made, 3, lambda row: 1.0 if row < 6 else 0.25)
    assert made.counts() == {"curriculum/resting": 6.0, "curriculum/never_drawn": 0.0}
    rested = draw(made, 3, lambda row: 0.25, first=3)
    assert set(joined(rested)) == set(range(6, 12)), "twelve draws of the six that aren't solved"
    later = draw(made, 3, first=6)  # two epochs after the first rounds
    assert {row for row in joined(rounds) if row < 6} <= set(joined(later))


def test_where_all_rest_the_longest_rested_come() -> None:
    made = state(revisit_after=100)
    rounds = draw(made, 3, lambda row: 1.0)
    assert sorted(draw(made, 1, first=3)[0]) == sorted(rounds[0])


def test_an_unjudged_prompt_keeps_its_rate() -> None:
    made = state()
    draw(made, 3, lambda row: float("nan"))
    assert made.counts()["curriculum/resting"] == 0 and (made.drawn == 1).all()


def test_rounds_are_shared_out_among_datasets_by_a_schedule() -> None:
    columns = {"source": ["a"] * 200 + ["b"] * 200}
    made = state(400, columns=columns, column="source", shares={"a": {0: 1, 40: 0}, "b": {0: 0, 40: 1}})
    of_a = [sum(row < 200 for row in rows) for rows in draw(made, 60)]
    assert of_a[0] == 4 and of_a[45:] == [0] * 15
    assert sum(of_a[:41]) == pytest.approx(sum(4 * (1 - step / 40) for step in range(41)), abs=8)
    fixed = state(400, columns=columns, column="source", shares={"a": 0.3, "b": 0.7})
    counts = [sum(row < 200 for row in rows) for rows in draw(fixed, 80)]
    assert {*counts} <= {1, 2} and sum(counts) == pytest.approx(0.3 * 320, abs=12)


def test_rounds_mix_levels_by_pass_rate() -> None:
    """Prompts of other levels fill a round where a level has too few."""
    made = state(100, shares={"hard": 0.5, "medium": 0.25, "new": 0.25})
    rates = {0: 0.0, 1: 0.5, 2: 0.9}
    first = draw(made, 25, lambda row: rates[row % 3])
    assert Counter(joined(first)).most_common(1)[0][1] > 1, "hard ones came again before all were new"
    levels = Counter(row % 3 for rows in draw(made, 40, lambda row: rates[row % 3], first=25) for row in rows)
    assert levels[0] > levels[1] > levels[2]
    assert (made.drawn[2::3] <= 1).all(), "easy ones have no share: each came while it was new"


def test_difficult_prompts_wait_for_their_step() -> None:
    made = state(12, columns={"level": list(range(12))}, difficulty="level", difficulty_until={0: 3, 8: 11})
    rounds = draw(made, 9)
    assert set(rounds[0]) == {0, 1, 2, 3}
    assert all(max(rows) <= 3 + step for step, rows in enumerate(rounds)) and 11 in draw(made, 3, first=9)[0]
    low = state(12, columns={"level": list(range(12))}, difficulty="level", difficulty_until=1)
    assert sorted(low.choose(0)) == [0, 1, 2, 3], "too few are easy enough: the next easiest fill the round"


def order(made: Any, rank: int = 0, ranks: int = 1) -> Any:
    made.data_rank, made.data_size = rank, ranks
    return made


def test_draws_are_equal_on_any_number_of_ranks() -> None:
    """A loaded record continues with the same draws."""

    def rate(row: int) -> float:
        return (row % 5) / 4

    def steps(made: Any, rank: int, ranks: int, rounds: int) -> list[Any]:
        found, mine = [], iter(order(made, rank, ranks))
        for _ in range(rounds):
            found.append(next(mine))
            rows = made._present
            number = made.rounds
            made.record([(number * PER_STEP + place, rate(row)) for place, row in enumerate(rows)])
        return found

    given: dict[str, Any] = {"solved_at": 0.75, "shares": {"new": 0.5, "hard": 0.5}}
    whole = steps(state(**given), 0, 1, 3)
    halves = [steps(state(**given), rank, 2, 3) for rank in (0, 1)]
    assert whole == [first + second for first, second in zip(*halves, strict=True)]
    assert [position for step in whole for _, position in step] == list(range(12))

    begun = state(**given)
    steps(begun, 0, 1, 2)
    resumed = state(**given)
    resumed.load(json.loads(json.dumps(begun.saved)))
    rest = list(order(resumed))
    assert rest[:2] == [[], []] and rest[2] == whole[2], "skipped rounds choose nothing"
    with pytest.raises(ValueError, match="curriculum has 12 prompts, but the dataset has 13"):
        state(13, **given).load(begun.saved)


def test_schedules_are_linear_between_their_points() -> None:
    made = Schedule.of({0: 1.0, 10: 0.0, "20": 4}, "x")
    assert [made.at(step) for step in (0, 5, 10, 15, 20, 99)] == [1.0, 0.5, 0.0, 2.0, 4.0, 4.0]
    assert Schedule.of(0.5, "x").at(7) == 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"solved": 1}, "'solved' isn't one of the keys pass_threshold, solved_at"),
        ({"solved_at": 2.0}, r"`solved_at` \(a pass rate\) is 2.0, but must be above 0 and at most 1"),
        ({"solved_at": "much"}, "must be a finite number"),
        (
            {"shares": {"simple": 1}},
            "has the pool 'simple', but without `column` the only pools are new, hard",
        ),
        ({"column": "source"}, "but `shares` isn't set: set"),
        ({"shares": {"hard": -1}}, "a share is negative"),
        ({"shares": {"hard": float("inf")}}, "a share is negative or infinite"),
        ({"solved_at": [1]}, r"`solved_at` is \[1\], but must be a finite number"),
        ({"revisit_after": float("nan")}, "`revisit_after` is nan, but must be a finite number"),
        ({"shares": {"hard": "half"}}, "the share of hard is 'half'"),
        ({"difficulty": "level"}, "set `difficulty`"),
    ],
)
def test_a_bad_curriculum_is_refused_with_the_rule(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        tiny.config(tmp_path, curriculum=given)


def test_what_the_data_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no column 'source'; it has 'prompt'"):
        state(column="source", shares={"a": 1})
    with pytest.raises(ValueError, match="has the value 'c', but `shares` has only"):
        state(4, columns={"source": ["a", "c"] * 2}, column="source", shares={"a": 1})
    with pytest.raises(ValueError, match="a row of the column 'level' has no number"):
        state(4, columns={"level": ["low", "high"] * 2}, difficulty="level", difficulty_until=1)


def test_dynamic_sampling_beside_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both choose further prompts"):
        tiny.config(tmp_path, curriculum={}, dynamic_sampling=True)


def test_parts_of_a_mixture_can_name_their_source(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "p"}\n' * 2)
    from colograd.config import ScriptArguments

    parts = [{"path": str(tmp_path / f"{name}.jsonl"), "source": name} for name in "ab"]
    train, _ = load_datasets(ScriptArguments(datasets=parts))
    assert train["source"] == ["a", "a", "b", "b"]

"""The table of completions: which rows it shows, and what is in them."""

from __future__ import annotations

import io
import itertools
import math
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.extensions.recording.completions import CompletionRow, completions_table, print_table
from colograd.extensions.recording.group_views import as_utf8, completion_rows

POSITIONS = itertools.count()


def make_group(
    prompt: Any, lengths: list[int], rewards: list[list[float]], advantages: list[float] | None = None
) -> ScoredGroup:
    rollouts = tuple(
        Rollout((1,), tuple(range(n)), torch.zeros(n), torch.ones(n, dtype=torch.bool), FinishReason.LENGTH, 0)
        for n in lengths
    )
    return ScoredGroup(
        Group({"prompt": prompt}, rollouts, next(POSITIONS)),
        torch.tensor(rewards),
        torch.tensor(advantages if advantages is not None else [0.0] * len(lengths)),
    )


def cells(table: Table, header: str) -> list[str]:
    column = next(c for c in table.columns if str(c.header) == header)
    return [str(cell) for cell in column.cells]


def show(groups: list[ScoredGroup], texts: list[list[str]], **options: Any) -> Table:
    settings: dict[str, Any] = {"reward_names": ["r"], "title": "5", "limit": None, "unique_prompts": False} | options
    return completions_table(rows(groups, texts), **settings)


def rows(groups: list[ScoredGroup], texts: list[list[str]]) -> list[CompletionRow]:
    return completion_rows(groups, [as_utf8(of_group) for of_group in texts], 5)


TWO = [make_group("p0", [2, 3], [[1.0], [0.0]]), make_group("p1", [4, 5, 6], [[0.0], [0.5], [1.0]])]
TEXTS = [["a0", "a1"], ["b0", "b1", "b2"]]


def test_row_shows_texts_rewards_advantage_tokens_and_end() -> None:
    group = make_group("two plus two", [2, 7], [[1.0, math.nan], [0.25, -3.0]], [0.5, -0.5])
    table = show([group], [["four", "five"]], reward_names=["right", "short"])
    assert [str(c.header) for c in table.columns] == [
        *("Prompt", "Completion", "right", "short"),
        *("Advantage", "Tokens", "End"),
    ]
    assert [next(map(str, c.cells)) for c in table.columns] == [
        "two plus two",
        "four",
        "1.00",
        "–",
        "0.50",
        "2",
        "length",
    ]
    assert [list(map(str, c.cells))[1] for c in table.columns] == [
        *("two plus two", "five", "0.25", "-3.00"),
        *("-0.50", "7", "length"),
    ]


def test_advantages_per_token_are_shown_as_their_mean() -> None:
    group = make_group("p", [1, 3], [[1.0], [0.0]], [4.0, 1.0, 2.0, 3.0])
    assert cells(show([group], [["a", "b"]]), "Advantage") == ["4.00", "2.00"]


@pytest.mark.parametrize(
    ("limit", "unique_prompts", "rows"),
    [
        (None, False, ["a0", "a1", "b0", "b1", "b2"]),
        (1, False, ["a0"]),
        (2, False, ["a0", "b0"]),
        (3, False, ["a0", "a1", "b0"]),
        (4, False, ["a0", "a1", "b0", "b1"]),
        (99, False, ["a0", "a1", "b0", "b1", "b2"]),
        (0, False, []),
        (None, True, ["a0", "b0"]),
        (1, True, ["a0"]),
    ],
)
def test_rows_are_spread_over_groups_first(limit: int | None, unique_prompts: bool, rows: list[str]) -> None:
    assert cells(show(TWO, TEXTS, limit=limit, unique_prompts=unique_prompts), "Completion") == rows


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}], "hello"),
        (
            [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
            "3",
        ),
        ([{"role": "system", "content": "be kind"}], "be kind"),
        ([{"role": "user", "content": None}], ""),
        ([], ""),
    ],
)
def test_a_conversation_shows_its_last_user_message(prompt: Any, shown: str) -> None:
    assert cells(show([make_group(prompt, [1], [[0.0]])], [["a"]]), "Prompt") == [shown]


@pytest.mark.parametrize("width", [120, 60, 200])
def test_long_texts_are_shortened_in_the_middle(width: int) -> None:
    text = "START" + "x" * 20_000 + "END"
    group = make_group(text, [1], [[0.0]])
    table = show([group], [[text]], width=width)
    for header in ("Prompt", "Completion"):
        (cell,) = cells(table, header)
        assert cell.startswith("START") and cell.endswith("END") and " … " in cell
        assert len(cell) <= 6 * width


def test_markup_and_control_characters_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    group = make_group("[bold]p[/bold]", [1], [[0.0]])
    print_table(rows([group], [["[red]\x1b[2J\x07 [/nothing]"]]), ["[r]"], "1", None, False)
    out = capsys.readouterr().out
    assert "[bold]p[/bold]" in out and "[/nothing]" in out and "[r]" in out
    assert "\x1b" not in out and "\x07" not in out


def test_the_table_is_printed_with_its_step_and_width(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(rows(TWO, TEXTS), ["r"], title="Step 5", limit=None, unique_prompts=False, width=80)
    out = capsys.readouterr().out
    assert "Step 5" in out and "b2" in out
    assert {len(line.rstrip()) for line in out.splitlines() if line.startswith("│")} == {80}


def test_a_log_that_cannot_encode_a_character_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_table(rows(TWO, [["é", "a"], ["b", "c", "d"]]), ["r"], "1", None, False)
    assert b"Completion" in raw.getvalue()


def test_no_groups_make_an_empty_table() -> None:
    assert show([], []).row_count == 0
    Console(file=io.StringIO()).print(show([], []))

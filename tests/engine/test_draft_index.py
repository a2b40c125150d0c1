"""A draft is what most of a prompt's other completions have behind the longest end of a text that occurs in them."""

from __future__ import annotations

import random

import pytest

from colograd.engine.draft_index import (
    BYTES_OF_COMPLETION,
    BYTES_OF_PROMPT,
    END,
    PRIOR,
    START,
    CompletionMemory,
    key_of,
    likeliest,
    propose,
)

PROMPT = key_of((1, 2, 3))


def memory(*completions: tuple[int, ...], most_bytes: int = 2**20) -> CompletionMemory:
    found = CompletionMemory(most_bytes)
    for each in completions:
        found.add(PROMPT, each)
    return found


@pytest.mark.parametrize(
    "completions, text, draft",
    [
        ([(5, 6, 7, 8, 9)], (START, 5, 6), [7, 8, 9]),
        ([(5, 6, 7), (4, 6, 8)], (4, 6), [8]),  # the longest end, though both have 6
        ([(6, 7, 8), (6, 7, 8), (6, 9)], (4, 6), [7, 8]),  # what most of them have
        ([(6, 7, 8), (9, 6, 5)], (START, 6), [7, 8]),  # the beginning of a completion is a part of the text
        ([(5, 6)], (5, 6), []),  # nothing behind it
        ([(5, 6)], (7,), []),
        ([], (7,), []),
    ],
)
def test_a_draft_is_what_followed(completions: list[tuple[int, ...]], text: tuple[int, ...], draft: list[int]) -> None:
    assert [token for token, _ in propose(memory(*completions).of(PROMPT), text, 3, 0.0)] == draft


def test_a_draft_ends_where_it_is_unlikely() -> None:
    spread = memory(*((5, 6, last, 1) for last in range(10, 20))).of(PROMPT)
    ((token, likely),) = propose(spread, (START, 5), 7, least=0.2)
    assert token == 6 and likely == pytest.approx(10 / (10 + PRIOR))
    assert len(propose(spread, (START, 5), 7, least=0.01)) == 3


def test_the_likeliest_drafts_fill_a_step() -> None:
    drafts = [[(5, 0.9), (6, 0.3)], [], [(7, 0.5), (8, 0.4), (9, 0.1)]]
    assert likeliest(drafts, 5) == [[5, 6], [], [7, 8, 9]]
    assert likeliest(drafts, 3) == [[5], [], [7, 8]]


def test_the_longest_end_is_found_as_by_comparing_all() -> None:
    draw = random.Random(0)
    for _ in range(50):
        completions = [tuple(draw.randrange(3) for _ in range(20)) for _ in range(3)]
        text = [draw.randrange(3) for _ in range(8)]
        ends = {
            (length, each[at])
            for each in completions
            for at in range(1, len(each))
            for length in range(1, 9)
            if length <= at and list(each[at - length : at]) == text[-length:]
        }
        longest = max(length for length, _ in ends)
        for token, _ in propose(memory(*completions).of(PROMPT), text, 1, 0.0):  # none: most of them end there
            assert (longest, token) in ends


def test_what_was_met_last_is_remembered() -> None:
    """And no more bytes than asked for: of a prompt its latest completions, of all prompts the latest ones."""
    kept = memory((5,) * 2**16, (6,) * 2**16, (7,) * 2**16)
    assert {*kept.of(PROMPT).tolist()} == {START, 6, 7, END}
    small = memory((5, 6), most_bytes=2 * BYTES_OF_PROMPT + 3 * (BYTES_OF_COMPLETION + 8))
    other = key_of((9,))
    small.add(other, (1, 2))
    small.add(PROMPT, (7, 8))  # met again
    assert len(small.of(other)) == 4
    small.add(key_of((8,)), (3, 4))
    assert len(small.of(other)) == 0
    assert small.of(PROMPT).tolist() == [START, 5, 6, END, START, 7, 8, END]


def test_a_completion_that_goes_on_is_remembered_once() -> None:
    found = memory((5, 6), (5, 7))
    found.add(PROMPT, (5, 6, 8), before=2)
    assert found.of(PROMPT).tolist() == [START, 5, 7, END, START, 5, 6, 8, END]


def test_prompts_with_other_pictures_are_others() -> None:
    assert len({key_of((1, 2)), key_of((1, 2), ["a"]), key_of((1, 2), ["b"])}) == 3

"""Each exam's checker on its published cases, and code that hangs, dies or cheats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import exam_cases
import pytest

from colograd.apps.exams import gpqa, gsm8k, math_answers, mbpp
from colograd.apps.exams.python_runner import run_python


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("2 + 3 = 5\n#### 5", "5", True),
        ("#### 1,200", "1200", True),
        ("it is #### -5", "-5", True),
        ("#### 4 no, #### 5", "5", True),  # the last one
        ("#### 5" + " " * 400, "5", False),  # verl reads the last 300 characters
        ("the answer is 5", "5", False),
        ("#### 5.", "5", False),  # as in verl
        ("#### $5", "5", False),
        ("", "5", False),
    ],
)
def test_gsm8k_reads_what_stands_behind_the_hashes(text: str, answer: str, right: bool) -> None:
    assert gsm8k.check(text, answer) is right


# Of math-verify's README and tests (huggingface/Math-Verify, tests/test_all.py): right answer, completion, verdict.
MATH = [
    ("{1,3} \\cup {2,4}", "${1,2,3,4}$", True),
    ("-5", "-5", True),
    ("7425000", "7,425,000", True),
    ("1000", "1000.0", True),
    ("0.4", ".4", True),
    ("1000.99", "$1,000.99", True),
    ("1000.99", "the number is not 10 which is 1,000.99€", True),
    ("\\frac{10}{9}", "\\boxed{\\frac{10}{9}}", True),
    ("1/3", "$\\frac13 $", True),
    ("[0,1)", "$[0,1)$", True),
    ("[0,9)", "$[0,1)$", False),
    ("(0,9)", "$[0,9)$", False),
    ("9", "Answer \\[ 9 \\]", True),
    ("9", "Answer \\( 9 \\)", True),
    ("9", "Answer $ \n 9 \n $", True),  # a bare number is an answer here
    ("10", "Answer \\( (9+1) \\)", True),
    ("10", "Answer \\( 9+2 \\)", False),
]


@pytest.mark.parametrize(("answer", "text", "right"), MATH)
def test_mathematics_is_judged_as_math_verify_publishes_it(answer: str, text: str, right: bool) -> None:
    assert math_answers.check(text, answer) is right


def test_an_answer_counts_behind_the_reasoning_alone_and_a_box_before_all_else() -> None:
    assert not math_answers.check("<think> \\boxed{204} </think> I don't know.", "204")
    assert not math_answers.check("<think> \\boxed{204} or, wait,", "204"), "cut off in its reasoning"
    assert math_answers.check("<think> 3 </think> Therefore $5 = 5$, \\boxed{204}. I hope it is correct, 7", "204")
    with pytest.raises(ValueError, match="can't read the right answer"):
        math_answers.check("1", "")


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Neon is noble.\nAnswer: B", "B", True),
        ("**Answer: $C$**", "C", True),
        ("answer : D", "D", True),
        ("Answer: A, no. Answer: B", "B", True),  # the last
        ("<think>Answer: A</think>", "A", False),
        ("Answer: Because", "B", False),
        ("The answer is B", "B", False),
    ],
)
def test_gpqa_reads_the_letter(text: str, answer: str, right: bool) -> None:
    assert gpqa.check(text, answer) is right


def test_gpqa_mixes_the_choices_by_the_row_alone() -> None:
    row = exam_cases.ROWS["gpqa"][0]
    asked = [gpqa.ask(row, number) for number in range(40)]
    assert asked == [gpqa.ask(row, number) for number in range(40)]
    assert {question.answer for question in asked} == set("ABCD")
    for question in asked:
        assert f"{question.answer}) Neon" in question.messages[0]["content"]


ADDS = "def add(a, b):\n    return a + b\n```\nIt adds."


def wanted(seconds: float = 60.0, plus: bool = False) -> str:
    asked = (mbpp.ask_plus if plus else mbpp.ask)(exam_cases.ADD, 0)
    return json.dumps(json.loads(asked.answer) | {"seconds": seconds})


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (ADDS, True),
        (f"\n{ADDS}", True),
        (f"I'd rather begin anew:\n```python\n{ADDS}", True),
        ("def add(a, b):\n    return a - b\n```", False),
        ("no code at all", False),
        ("def add(a, b):\n    return 3\n```", False),  # what the first test wants
        ("import os\nos._exit(0)\n```", False),  # with status 0, before the tests
        ("raise SystemExit\n```", False),
        ("def add(a, b):\n    return a + b\nx = [0] * 10**12\n```", False),  # no memory for that
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n```", False),
    ],
)
def test_mbpp_runs_the_tests_behind_the_completions_code(text: str, right: bool) -> None:
    assert mbpp.check(text, wanted()) is right


def test_mbpp_plus_has_more_tests() -> None:
    lazy = "def add(a, b):\n    return 3 if a == 1 else 0.75\n```"
    assert mbpp.check(lazy, wanted()) and not mbpp.check(lazy, wanted(plus=True))
    assert mbpp.check(ADDS, wanted(plus=True))


def test_a_program_that_hangs_is_killed_with_what_it_started_and_gets_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = run_python("import subprocess, sys, time\nsubprocess.Popen(['sleep', '999'])\ntime.sleep(999)", 1.0)
    assert (ended.passed, ended.problem) == (False, "late")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run_python("import os\nassert 'HF_TOKEN' not in os.environ\nassert os.listdir('.')", 60).passed
    ended = run_python("assert 1 == 2, 'two'", 60)
    assert not ended.passed and "AssertionError: two" in ended.problem


def test_the_question_of_mbpp_is_an_answer_begun() -> None:
    asked: Any = mbpp.ask(exam_cases.ADD, 0)
    assert asked.messages[-1]["role"] == "assistant" and asked.messages[-1]["content"].endswith("```python\n")
    assert '"""\nWrite a function to add two numbers.\nassert add(1, 2) == 3\n"""' in asked.messages[0]["content"]


def test_recipes_train_on_the_exams_question_and_rule(tmp_path: Path) -> None:
    """The rewards of the recipes that reproduce a published number, and their data."""
    rows = gsm8k.training_rows(str(exam_cases.write(tmp_path)["gsm8k"]))
    assert rows["prompt"][0] == list(gsm8k.ask(exam_cases.ROWS["gsm8k"][0], 0).messages) and rows["answer"][1] == "1200"
    messages = [[{"role": "assistant", "content": text}] for text in ("#### 1,200", "1200")]
    assert gsm8k.reward(completions=messages, answer=["1200", "1200"]) == [1.0, 0.0]
    assert math_answers.reward(["\\boxed{\\frac12}", "2"], expected_answer=["0.5", ""]) == [1.0, None]

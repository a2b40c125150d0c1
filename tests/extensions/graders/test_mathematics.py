"""Mathematical answers as math-verify and verl read them."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from colograd.rewards import accuracy_reward, math_answer_reward, reasoning_accuracy_reward

ENDLESS = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"


MATHS = [r"so $\boxed{\frac{1}{3}}$", r"so $\boxed{\frac{1}{2}}$", "nothing", r"\boxed{1}"]
SOLUTIONS = [r"$\frac{1}{3}$", r"$\frac{1}{3}$", r"$\frac{1}{3}$", ""]


def in_thread(function: Any, *arguments: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)))
    thread.start()
    thread.join()
    return results[0]


def test_an_endless_expression_is_wrong_within_seconds() -> None:
    accuracy_reward(["1"], ["1"])  # starts the process
    logged: dict[str, list[Any]] = {}
    started = time.monotonic()
    assert in_thread(accuracy_reward, [ENDLESS, r"\boxed{4}"], ["$4$", "$4$"], logged.__setitem__) == [0.0, 1.0]
    assert time.monotonic() - started < 30
    assert logged["gold_parsed"] == ["4", "4"] and logged["answer_parsed"][0].startswith(r"\frac{5^{")


def test_reasoning_without_end_is_logged_so() -> None:
    logged: dict[str, list[Any]] = {}
    reasoning_accuracy_reward(["no end", r"</think>\boxed{4}"], ["4", "4"], log_extra=logged.__setitem__)
    assert logged["answer_parsed"] == ["[incomplete reasoning]", "4"]


@pytest.mark.parametrize(
    ("completion", "solution", "expected"),
    [
        (r"\boxed{5}. That is wrong; so \boxed{42}", "42", 1.0),
        (r"\boxed{5}. That is wrong; so \boxed{42}", "5,42", 0.0),
        (r"$\boxed{1}$ and $\boxed{2}$", "1,2", 1.0),
        (r"\boxed{\boxed{42}} and, cut off, \boxed{7", "42", 1.0),
        (r"\fbox{42}", "42", 1.0),
        (r"\boxed{42.}", "42", 1.0),
        (r"\boxed{\varnothing}", r"\emptyset", 1.0),
        (r"\boxed{\emptyset}", r"$\varnothing$", 1.0),
        (r"\boxed{100000}", "1e5", 1.0),
        (r"\boxed{100000}", 1e5, 1.0),
        (r"\boxed{1.5e-3}", "0.0015", 1.0),
        (r"\boxed{5}", 1e-5, 0.0),
        (r"\boxed{16}", 1e16, 0.0),
        (r"\boxed{0.0}", "0.0000001", 0.0),
        (r"\boxed{0.0000002}", "0.0000001", 0.0),
        (r"\boxed{0.0000001}", "0", 0.0),
        (r"\boxed{0.333333}", r"\frac13", 1.0),
        (r"\boxed{\dfrac12}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{1\frac12}", r"$\frac{3}{2}$", 1.0),
        (r"\boxed{\frac{1}{\sqrt3}}", r"$\frac{\sqrt{3}}{3}$", 1.0),
        (r"\boxed{x+1}", "x+1", 1.0),
        (r"\boxed{1}", "x+1", 0.0),
        (r"\boxed{18.90}", r"\$18.90", 1.0),
        (r"\boxed{72}", "It is $48/2 = $24.\n#### 72", 1.0),
        (r"\boxed{\text{None}}", None, None),
        (r"\boxed{\text{nan}}", float("nan"), None),
        (None, "42", 0.0),
    ],
)
def test_mathematical_answers_are_read_as_written(completion: Any, solution: Any, expected: float | None) -> None:
    messages = [{"role": "assistant", "content": completion}]
    assert accuracy_reward([messages], [solution]) == [expected]
    assert in_thread(math_answer_reward, [messages], [solution]) == [expected]


def test_accuracy_is_math_verify_s_opinion() -> None:
    seen: dict[str, list[Any]] = {}
    assert accuracy_reward(MATHS, SOLUTIONS, log_extra=seen.__setitem__) == [1.0, 0.0, 0.0, None]
    assert seen["solution"] == SOLUTIONS and seen["answer_parsed"][2:] == ["[unparseable]", "[skipped]"]
    assert seen["gold_parsed"] == [r"\frac{1}{3}"] * 3 + ["[unparseable]"]


def test_accuracy_works_outside_the_main_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(accuracy_reward(MATHS, SOLUTIONS)))
    thread.start()
    thread.join()
    assert results == [[1.0, 0.0, 0.0, None]]


def test_accuracy_without_math_verify_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        accuracy_reward(MATHS, SOLUTIONS)


@pytest.mark.parametrize("content", [None, [], ""])
def test_an_empty_content_is_no_answer(content: Any) -> None:
    talk = [{"role": "assistant", "content": content}]
    for function in (accuracy_reward, reasoning_accuracy_reward, math_answer_reward):
        assert function([talk], ["42"]) == [0.0]


def test_parts_of_a_content_are_one_text() -> None:
    parts = [{"type": "text", "text": "#### 4"}, {"type": "image"}, {"type": "text", "text": "2"}]
    assert math_answer_reward([[{"role": "assistant", "content": parts}]], ["42"]) == [1.0]


def test_an_answer_inside_a_begun_thought_does_not_count() -> None:
    begun = "<|im_start|>assistant\n<think>\n"
    texts = [r"\boxed{4}, wait", r"5</think>\boxed{4}"]
    assert math_answer_reward(texts, ["4", "4"], prompt_texts=[begun] * 2) == [0.0, 1.0]
    apart = [{"role": "assistant", "reasoning_content": "5", "content": r"\boxed{4}"}]
    assert math_answer_reward([apart], ["4"], prompt_texts=[begun]) == [1.0]

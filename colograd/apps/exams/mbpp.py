"""MBPP (arXiv 2108.07732) in EvalPlus' edition (arXiv 2305.01210), 378 problems: ``mbpp`` has the problem's own
tests, about three, and ``mbpp_plus`` many more.

The question is EvalPlus': the problem and its first test in a docstring, and the beginning of an answer with an open
block of code, which the model continues. The code runs in a separate process: `apps/exams/python_runner.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .exam import Exam, Published, Question
from .python_runner import run_python

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
BEGINNING = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
FENCE = "\n```"
SECONDS = {"mbpp": 20.0, "mbpp_plus": 60.0}  # limit of a solution's tests
QWEN = "https://arxiv.org/abs/2409.12186"


def ask(row: Mapping[str, Any], number: int) -> Question:
    """Convert a row of evalplus/mbppplus, judged by ``test_list``."""
    return _question(row, "mbpp", "\n".join([*(row.get("test_imports") or ()), *row["test_list"]]))


def ask_plus(row: Mapping[str, Any], number: int) -> Question:
    """Convert the same row, judged by ``test`` too."""
    own = [*(row.get("test_imports") or ()), *row["test_list"]]
    return _question(row, "mbpp_plus", "\n".join([*own, str(row["test"])]))


def _question(row: Mapping[str, Any], name: str, tests: str) -> Question:
    problem = f'"""\n{row["prompt"]}\n{row["test_list"][0]}\n"""'
    return Question(
        (
            {"role": "user", "content": f"{INSTRUCTION}\n```\n{problem}\n```\n"},
            {"role": "assistant", "content": BEGINNING},
        ),
        json.dumps({"tests": tests, "seconds": SECONDS[name]}),
    )


def check(text: str, answer: str) -> bool:
    """Return whether the tests pass behind the completion's code."""
    wanted = json.loads(answer)
    return run_python(f"{code_of(text)}\n{wanted['tests']}\n", wanted["seconds"]).passed


def code_of(text: str) -> str:
    """Return the code of a completion. It continues an open block; a model that ignores this begins its own block."""
    if "```python" in text:
        text = text.partition("```python")[2]
    return ("\n" + text).partition(FENCE)[0].lstrip("\n")


def _exam(name: str, ask_it: Any, columns: tuple[str, ...], published: tuple[Published, ...]) -> Exam:
    return Exam(
        name=name,
        path="evalplus/mbppplus",
        config=None,
        split="test",
        columns=("prompt", "test_list", *columns),
        ask=ask_it,
        check="colograd.apps.exams.mbpp:check",
        source="https://github.com/evalplus/evalplus/blob/master/evalplus/codegen.py",
        published=published,
        max_tokens=768,
        stop=(FENCE,),
        seconds=2 * SECONDS[name] + 20,
    )


MBPP = _exam(
    "mbpp",
    ask,
    (),
    (Published("Qwen2.5-Coder-1.5B-Instruct", 69.2, QWEN), Published("Qwen2.5-Coder-7B-Instruct", 83.5, QWEN)),
)
MBPP_PLUS = _exam(
    "mbpp_plus",
    ask_plus,
    ("test",),
    (Published("Qwen2.5-Coder-1.5B-Instruct", 59.4, QWEN), Published("Qwen2.5-Coder-7B-Instruct", 71.7, QWEN)),
)

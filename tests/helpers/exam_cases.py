"""Tiny files with the columns of the exams' datasets, and a made-up exam. Imported by tests, and by workers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colograd.apps.exams import Exam, Question

ADD = {
    "task_id": 2,
    "prompt": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "source_file": "made up",
    "test_imports": ["import math"],
    "test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(0.5, 0.25), 0.75)"],
    "test": "for a in range(20):\n    assert add(a, a) == 2 * a",
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"question": "What is 20 times 60?", "answer": "#### 1,200"},
        {"question": "What is 4 - 9?", "answer": "#### -5"},
    ],
    "math500": [
        {"problem": "Add $\\frac12$ and $\\frac14$.", "answer": "\\frac{3}{4}", "subject": "Algebra", "level": 1},
        {"problem": "Which interval is $0 \\le x < 1$?", "answer": "[0,1)", "subject": "Algebra", "level": 1},
    ],
    "aime24": [{"id": 60, "problem": "What is $3 \\cdot 68$?", "answer": "204", "year": "2024"}],
    "aime25": [{"id": 1, "problem": "What is $7 \\cdot 10$?", "answer": "70", "year": "2025"}],
    "gpqa": [
        {
            "Question": "Which is a noble gas?",
            "Correct Answer": "Neon",
            "Incorrect Answer 1": "Oxygen",
            "Incorrect Answer 2": "Iron",
            "Incorrect Answer 3": "Carbon\n",
        }
    ],
    "mbpp": [ADD],
    "mbpp_plus": [ADD],
}


def write(folder: Path) -> dict[str, Path]:
    """A JSON-lines file for each exam."""
    found = {}
    for name, rows in ROWS.items():
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


# -- a made-up exam: how many bytes of a completion are letters


def ask(row: Mapping[str, Any], number: int) -> Question:
    return Question.of_user(str(row["question"]), "3")


def check(text: str, answer: str) -> bool:
    return sum(letter.isalpha() for letter in text) >= int(answer)


def unruly(text: str, answer: str) -> bool:
    """What code under test may do to its worker."""
    if text == "hang":
        time.sleep(1000)
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "raise":
        raise KeyError("no such thing")
    return text == answer


LETTERS = Exam(
    name="letters",
    path="made/up",
    config=None,
    split="test",
    columns=("question",),
    ask=ask,
    check="exam_cases:check",
    source="https://example.org",
    published=(),
    n=4,
    temperature=1.0,
    max_tokens=8,
)

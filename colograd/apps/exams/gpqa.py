"""GPQA Diamond (arXiv 2311.12022), 198 questions: with the question of OpenAI's simple-evals and Open-R1's sampling.

Two differences from simple-evals: all completions of a question see its four choices in one order (there each has its
own). The last answer of a completion counts, behind a ``<think>`` block if there is one (there the first).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from ...rewards.answers import after_thinking
from .competition_math import OPEN_R1, REASONING
from .exam import Exam, Published, Question

PROMPT = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
    "{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}"
)
ANSWER = re.compile(r"(?i:answer)[ \t]*:[ \t]*\$?([A-D])\$?(?!\w)")
CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def ask(row: Mapping[str, Any], number: int) -> Question:
    """Convert a row of Idavidrein/gpqa; the order of its choices depends only on the row's number."""
    order = random.Random(number).sample(CHOICES, len(CHOICES))
    lettered = {letter: str(row[choice]).strip() for letter, choice in zip("ABCD", order, strict=True)}
    text = PROMPT.format(question=str(row["Question"]).strip(), **lettered)
    return Question.of_user(text, "ABCD"[order.index(CHOICES[0])])


def check(text: str, answer: str) -> bool:
    """Return whether the last ``Answer: LETTER`` names the right choice."""
    found = ANSWER.findall(after_thinking(text).replace("*", ""))  # **Answer: B**
    return bool(found) and found[-1] == answer


GPQA = Exam(
    name="gpqa",
    path="Idavidrein/gpqa",
    config="gpqa_diamond",
    split="train",
    columns=("Question", *CHOICES),
    ask=ask,
    check="colograd.apps.exams.gpqa:check",
    source="https://github.com/openai/simple-evals/blob/main/gpqa_eval.py",
    published=(
        Published("DeepSeek-R1-Distill-Qwen-1.5B", 35.8, OPEN_R1, "DeepSeek reports 33.8"),
        Published("DeepSeek-R1-Distill-Qwen-7B", 50.5, OPEN_R1, "DeepSeek reports 49.1"),
    ),
    n=8,
    **REASONING,
)

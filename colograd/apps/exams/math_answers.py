"""The checker of mathematical answers: math-verify, with the extraction that lighteval uses for MATH-500 and AIME."""

from __future__ import annotations

from ...rewards.answers import after_thinking
from ...rewards.mathematics import compare
from ...rewards.mathematics import math_answer_reward as reward

__all__ = ["UnreadableAnswer", "check", "reward"]


class UnreadableAnswer(ValueError):
    """A dataset's answer that math-verify can't read."""


def check(text: str, answer: str) -> bool:
    """Return whether the last boxed expression (else other LaTeX, else a bare number) equals the answer, in LaTeX.

    Text in a reasoning model's ``<think>`` block is no answer (`after_thinking`).

    Raises:
        UnreadableAnswer: math-verify can't read the right answer.
    """
    right = compare(after_thinking(text), answer, bare_numbers=True).right
    if right is None:
        raise UnreadableAnswer(f"math-verify can't read the right answer {answer!r}")
    return right

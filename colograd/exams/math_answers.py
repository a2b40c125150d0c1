"""The checker of mathematical answers: math-verify, with the extraction that lighteval uses for MATH-500 and AIME."""

from __future__ import annotations

from typing import Any

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ImportError(f"these exams are checked by math-verify ({error}): pip install math-verify") from error

from .exam import after_thinking

SECONDS = 20  # that math-verify may take to read or to compare an expression
IN_ANSWER = (ExprExtractionConfig(), LatexExtractionConfig(boxed_match_priority=0))


class UnreadableAnswer(ValueError):
    """The dataset's answer isn't one that can be compared."""


def check(text: str, answer: str) -> bool:
    """Whether the last boxed expression (else other LaTeX, else a bare number) equals the answer, which is LaTeX.

    What stands in a reasoning model's ``<think>`` block is no answer (`exam.after_thinking`).

    Raises:
        UnreadableAnswer: math-verify can't read the right answer.
    """
    gold = parse(f"${answer}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=SECONDS)
    gold = gold or parse(answer, parsing_timeout=SECONDS)
    if not gold:
        raise UnreadableAnswer(f"math-verify can't read the right answer {answer!r}")
    given = parse(after_thinking(text), extraction_config=IN_ANSWER, parsing_timeout=SECONDS)
    return bool(verify(gold, given, float_rounding=5, timeout_seconds=SECONDS))


def reward(completions: list[Any], expected_answer: list[Any], **kwargs: Any) -> list[float | None]:
    """`check` as a reward function, for a column ``expected_answer``; None where that can't be read."""
    rewards: list[float | None] = []
    for completion, answer in zip(completions, expected_answer, strict=True):
        try:
            text = completion if isinstance(completion, str) else completion[-1]["content"]
            rewards.append(float(check(text, str(answer))))
        except UnreadableAnswer:
            rewards.append(None)
    return rewards

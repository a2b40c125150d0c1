"""`judge`: compares mathematical answers. math-verify's time limits (SIGALRM) need a process's main thread."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from ...rewards.answers import Verdict

SECONDS = 5
# TRL's rule: the last \boxed{}, or else LaTeX behind words such as "the answer is".
LATEX = (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),)
# lighteval's rule for MATH-500 and AIME: the last \boxed{}, or else LaTeX or a number, first behind "answer".
LATEX_OR_NUMBER = (ExprExtractionConfig(), LatexExtractionConfig(boxed_match_priority=0))
ROUNDING = {LATEX: 6, LATEX_OR_NUMBER: 5}  # Decimals to compare, as in math-verify and lighteval.
GOLD = (LatexExtractionConfig(), ExprExtractionConfig())
MOST_DIGITS = 30  # Numbers with larger exponents aren't written out (1e5 as 100000).

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\{|\}")
_JOINT = re.compile(r"(?:\s|\$|\\[()\[\]]|\\quad\b|,|;|and\b|or\b|\\text\s*\{\s*(?:and|or)\s*\})+")
_EXPONENT = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,4})(?![\w.]*[0-9])")
_ANCHOR = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
_WORD = re.compile(r"\b(?!(?:and|or)\b)[A-Za-z]{2,}")

logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge(text: str, gold: str, bare_numbers: bool) -> Verdict:
    # Without ``$`` or a box, a formula is read as LaTeX first, a sentence ("the answer is 42") as plain text first.
    final = _answer_in(gold.rpartition("####")[2].strip())
    ways = [final]
    if not _ANCHOR.search(final):
        ways = [final, f"${final}$"] if "\\" not in final and _WORD.search(final) else [f"${final}$", final]
    expected: list[Any] = next((parsed for way in ways if (parsed := _read(way, GOLD))), [])
    if not expected:
        return Verdict(None, "[unparseable]", "[skipped]")
    extraction = LATEX_OR_NUMBER if bare_numbers else LATEX
    answer = _read(_answer_in(text), extraction, first=not bare_numbers)
    shown, rounding = _shown(expected), ROUNDING[extraction]
    if re.fullmatch(r"-?[0-9]*\.?[0-9]+", shown):  # Small numbers need more decimals: 0.0001 needs 3 more.
        number = Decimal(shown)
        rounding += max(0, -number.adjusted() - 1) if number else MOST_DIGITS
    right = verify(expected, answer, float_rounding=rounding, timeout_seconds=SECONDS)
    return Verdict(bool(right), shown, _shown(answer))


def _read(text: str, extraction: tuple[Any, ...], first: bool = False) -> list[Any]:
    mode: Any = "first_match" if first else "any_match"
    parsed: list[Any] = parse(text, extraction_config=extraction, extraction_mode=mode, parsing_timeout=SECONDS)
    return parsed


def _shown(parsed: list[Any]) -> str:
    """Return a parsed answer's source text. Printing its expression would evaluate powers and might never end."""
    return next((part for part in parsed if isinstance(part, str)), "[unparseable]")


def _answer_in(text: str) -> str:
    r"""Return the last ``\boxed{}`` of a text in a form that math-verify reads. Without a box return the whole text.

    Boxes before the last one are returned too if only commas, semicolons, "and" or "or" join them to it. math-verify
    alone would also read a box that the text corrects later."""
    boxes: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            while boxes and boxes[-1][0] > start.start():
                boxes.pop()
            boxes.append((start.start(), brace.end(), text[start.end() : brace.start()]))
    if not boxes:
        return _readable(text)
    first = len(boxes) - 1
    while first:
        between = text[boxes[first - 1][1] : boxes[first][0]]
        if not _JOINT.fullmatch(between) or not re.search(r",|;|and|or", between):
            break
        first -= 1
    return ",".join(rf"\boxed{{{_readable(content)}}}" for _, _, content in boxes[first:])


def _readable(text: str) -> str:
    r"""Remove a final full stop, and rewrite 1e-05 and ``\varnothing``, because math-verify can't read them."""
    text = re.sub(r"(?<!\\)[.\s]+\Z", "", text).replace(r"\varnothing", r"\emptyset")

    def without_exponent(number: re.Match[str]) -> str:
        value = Decimal(number[0])
        short = not value or abs(value.adjusted()) <= MOST_DIGITS
        return f"{value:f}" if short else rf"{number[1]} \cdot 10^{{{int(number[2])}}}"

    return _EXPONENT.sub(without_exponent, text)

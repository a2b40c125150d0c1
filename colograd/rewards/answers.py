"""Answers in completions: the text that the model wrote, its numbers, and the text behind a thought."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-\$?)?"  # a sign, unless it follows a digit or a word: 10-5 ends in 5
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # 1,234.5 or 1234.5
    r"|(?<![0-9.])\.[0-9]+)"  # .5
    r"(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?"  # 1e-05
)
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # keys of a message where parsers put the thought
_OTHERS = ("tool", "user")  # roles of messages by tools and environments
_BEHIND_HASHES = re.compile(r"#### (-?[0-9.,]+)")
HASHES_WITHIN = 300  # characters at a completion's end that are read, as in verl
_FLOAT_TOLERANCE = Decimal("1e-12")  # relative; needed as a float such as 0.1 + 0.2 isn't exactly 0.3


class Verdict(NamedTuple):
    """The judgement of a mathematical answer, with the texts that were compared."""

    right: bool | None  # None: the right answer can't be read
    gold: str  # the text of the right answer
    answer: str  # the text of the completion's answer


def text_of(completion: Any) -> str:
    """Return a completion's text. A conversation's text is its last message, or "" if the model didn't write it."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    content = "" if last.get("role") in _OTHERS else last.get("content")
    if isinstance(content, (list, tuple)):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        return "".join(text for text in texts if text)
    return "" if content is None else str(content)


def thought_begun(prompt_texts: Sequence[str] | None, count: int) -> list[bool]:
    """Return for each of ``count`` completions whether the chat template began the thought at the prompt's end."""
    return [text.rstrip().endswith("<think>") for text in prompt_texts] if prompt_texts else [False] * count


def has_thought_apart(completion: Any) -> bool:
    """Return whether the tokenizer's own parser took the thought out of a message's content."""
    return bool(completion) and isinstance(completion, list) and any(completion[-1].get(key) for key in _THOUGHTS)


def after_thinking(text: str, begun: bool = False) -> str:
    """Return a completion without its ``<think>`` block, or "" if the block has no end.

    Args:
        begun: whether the prompt ends in ``<think>``, so that the completion starts inside the block.
    """
    _, end, answer = text.rpartition("</think>")
    return answer if end or not (begun or "<think>" in text) else ""


def number_in(value: Any) -> Decimal | None:
    """Return the last number of a text, or a number itself. None: there is no number."""
    numbers = _NUMBER.findall(str(value).replace("\u2212", "-"))  # the typographic minus sign
    return Decimal(re.sub(r"[,$]", "", numbers[-1])) if numbers else None


def _right_number(number: Decimal | None, answer: Any) -> float | None:
    gold = number_in(answer)
    if gold is None:
        return None
    tolerance = abs(gold) * _FLOAT_TOLERANCE if isinstance(answer, float) else Decimal(0)
    return float(number is not None and abs(number - gold) <= tolerance)


def last_number(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Return 1.0 if the completion's last number equals the last number in the column ``answer``, else 0.0.

    Numbers are integers or decimals, with or without commas or an exponent: ``#### 42`` (GSM8K), ``-5``, ``$1,234.50``,
    ``42.``, ``1e-05``. They are compared exactly, as decimals. If ``answer`` is a float, they are compared to 12
    digits. The reward is None if ``answer`` holds no number.
    """
    pairs = zip(completions, answer, strict=True)
    return [_right_number(number_in(text_of(completion)), expected) for completion, expected in pairs]


def gsm8k_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Return 1.0 if the number behind the completion's last ``####`` equals the column ``answer``, else 0.0.

    As in verl, only the last 300 characters are read, and ``#### $5`` and ``#### 5.`` hold no number. Unlike verl,
    which compares texts, this compares numbers: ``#### 5.00`` is 5. ``answer`` is a number, or a text that ends in a
    number, such as GSM8K's own answers. The reward is None if ``answer`` holds no number.
    """
    pairs = zip(completions, answer, strict=True)
    rewards = []
    for completion, expected in pairs:
        plain = behind_hashes(text_of(completion)[-HASHES_WITHIN:]) or ""
        is_number = re.fullmatch(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", plain)
        rewards.append(_right_number(Decimal(plain) if is_number else None, expected))
    return rewards


def behind_hashes(text: str) -> str | None:
    """Return the digits behind a text's last ``####``, with sign and points but without commas."""
    numbers = _BEHIND_HASHES.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def chance_of_pass(n: int, c: int, k: int) -> float:
    """Estimate the chance that at least one of k completions is right, if c of n are right: 1 - C(n-c, k) / C(n, k),
    which is unbiased (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

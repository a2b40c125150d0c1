"""Answers in completions: the text that the model wrote, the numbers in a text, and the text after ``</think>``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-\$?)?"  # Sign of a number. A minus after a digit or word is no sign, so 10-5 ends in 5.
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # Number such as 1,234.5 or 1234.5.
    r"|(?<![0-9.])\.[0-9]+)"  # Number such as .5.
    r"(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?"  # Exponent, as in 1e-05.
)
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # Keys of a message where parsers store the model's thought.
_OTHERS = ("tool", "user")  # Roles of messages that tools and environments write.
_BEHIND_HASHES = re.compile(r"#### (-?[0-9.,]+)")
HASHES_WITHIN = 300  # Number of characters at a completion's end where `gsm8k_reward` looks for "####", as in verl.
_FLOAT_TOLERANCE = Decimal("1e-12")  # Relative tolerance for float answers, because 0.1 + 0.2 isn't exactly 0.3.


class Verdict(NamedTuple):
    """The judgement of a completion's mathematical answer, with the two texts that were compared."""

    right: bool | None  # Whether the completion's answer is right. None: the dataset's answer can't be parsed.
    gold: str  # Text of the dataset's right answer.
    answer: str  # Text of the completion's answer.


def text_of(completion: Any) -> str:
    """Return the text of a completion, a str or a list of messages. The text of a list of messages is the last
    message's content, or "" if a tool or user wrote the last message."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    content = "" if last.get("role") in _OTHERS else last.get("content")
    if isinstance(content, (list, tuple)):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        return "".join(text for text in texts if text)
    return "" if content is None else str(content)


def thought_begun(prompt_texts: Sequence[str] | None, count: int) -> list[bool]:
    """Return for each of ``count`` completions whether its prompt ends in ``<think>``, written by the chat template."""
    return [text.rstrip().endswith("<think>") for text in prompt_texts] if prompt_texts else [False] * count


def has_thought_apart(completion: Any) -> bool:
    """Return whether the completion's last message has the model's thought under a separate key, e.g. "thinking"."""
    return bool(completion) and isinstance(completion, list) and any(completion[-1].get(key) for key in _THOUGHTS)


def after_thinking(text: str, begun: bool = False) -> str:
    """Return the text after the last ``</think>``, all of ``text`` if it has no thought, or "" if a thought has no end.

    Args:
        begun: whether the prompt ends in ``<think>``, so that the completion starts inside the block.
    """
    _, end, answer = text.rpartition("</think>")
    return answer if end or not (begun or "<think>" in text) else ""


def number_in(value: Any) -> Decimal | None:
    """Return the last number in ``value``, a text or a number. None means that ``value`` has no number."""
    numbers = _NUMBER.findall(str(value).replace("\u2212", "-"))  # \u2212 is the typographic minus sign.
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
    ``42.``, ``1e-05``. Numbers are compared exactly, as decimals, or to 12 digits if ``answer`` is a float. The reward
    is None if ``answer`` has no number."""
    pairs = zip(completions, answer, strict=True)
    return [_right_number(number_in(text_of(completion)), expected) for completion, expected in pairs]


def gsm8k_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Return 1.0 if the number after the completion's last ``####`` equals the column ``answer``, else 0.0.

    As in verl, only the last 300 characters are read, and ``#### $5`` and ``#### 5.`` don't count as numbers. verl
    compares texts, but this function compares numbers, so ``#### 5.00`` equals 5. ``answer`` is a number, or a text
    that ends in a number, such as GSM8K's answers. The reward is None if ``answer`` has no number."""
    pairs = zip(completions, answer, strict=True)
    rewards = []
    for completion, expected in pairs:
        plain = behind_hashes(text_of(completion)[-HASHES_WITHIN:]) or ""
        is_number = re.fullmatch(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", plain)
        rewards.append(_right_number(Decimal(plain) if is_number else None, expected))
    return rewards


def behind_hashes(text: str) -> str | None:
    """Return the number after a text's last ``####``: sign, digits and points, without commas. None: no such number."""
    numbers = _BEHIND_HASHES.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def chance_of_pass(n: int, c: int, k: int) -> float:
    """Estimate pass@k without bias: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, equation 1). It is the chance that at
    least one of k completions is right, given that c of n sampled completions are right."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

"""The built-in reward functions, and helpers that find text, numbers and the end of the reasoning in completions."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from ..runtime import registry

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-\$?)?"  # A sign, but not the minus of 10-5.
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # Numbers such as 1,234.5 and 1234.5.
    r"|(?<![0-9.])\.[0-9]+)"  # Numbers such as .5.
    r"(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?"
)
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")
_OTHERS = ("tool", "user")
_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_BEHIND_HASHES = re.compile(r"#### (-?[0-9.,]+)")
HASHES_WITHIN = 300  # Characters of a completion's end that `gsm8k_reward` reads, as in verl.
_FLOAT_TOLERANCE = Decimal("1e-12")  # Relative tolerance for answers that are floats.


class Verdict(NamedTuple):
    right: bool | None  # Whether the answer is right. None: the dataset's answer can't be parsed.
    gold: str
    answer: str


def text_of(completion: Any) -> str:
    """Return a completion's text. For a list of messages: the last message's text, or "" if a tool or user wrote it."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    content = "" if last.get("role") in _OTHERS else last.get("content")
    if isinstance(content, (list, tuple)):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        return "".join(text for text in texts if text)
    return "" if content is None else str(content)


def thought_begun(prompt_texts: Sequence[str] | None, count: int) -> list[bool]:
    return [text.rstrip().endswith("<think>") for text in prompt_texts] if prompt_texts else [False] * count


def has_thought_apart(completion: Any) -> bool:
    """Return whether the last message has the reasoning under a separate key, such as `reasoning_content`."""
    return bool(completion) and isinstance(completion, list) and any(completion[-1].get(key) for key in _THOUGHTS)


def after_thinking(text: str, begun: bool = False) -> str:
    """Return the text after the reasoning, i.e. after the last ``</think>``.

    Without a ``</think>``, return "" if ``text`` has a ``<think>`` or the prompt ends in one (``begun``), else return
    all of ``text``."""
    _, end, answer = text.rpartition("</think>")
    return answer if end or not (begun or "<think>" in text) else ""


def number_in(value: Any) -> Decimal | None:
    numbers = _NUMBER.findall(str(value).replace("\u2212", "-"))
    return Decimal(re.sub(r"[,$]", "", numbers[-1])) if numbers else None


def _right_number(number: Decimal | None, answer: Any) -> float | None:
    gold = number_in(answer)
    if gold is None:
        return None
    tolerance = abs(gold) * _FLOAT_TOLERANCE if isinstance(answer, float) else Decimal(0)
    return float(number is not None and abs(number - gold) <= tolerance)


def last_number(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Return for each completion 1.0 if its last number equals the last number in the column ``answer``, else 0.0.

    Numbers are integers or decimals: ``#### 42`` (GSM8K), ``-5``, ``$1,234.50``, ``42.``, ``1e-05``. They are compared
    exactly, or to 12 digits if the answer is a float. The reward is None if ``answer`` has no number."""
    pairs = zip(completions, answer, strict=True)
    return [_right_number(number_in(text_of(completion)), expected) for completion, expected in pairs]


def gsm8k_reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """Return for each completion 1.0 if its last number after a ``####`` equals the column ``answer``, else 0.0.

    As in verl, only the last 300 characters are read, and neither ``#### $5`` nor ``#### 5.`` counts as 5. Unlike verl,
    ``#### 5.00`` equals 5. The column ``answer`` has numbers, or texts whose last number counts. The reward is None if
    an answer has no number."""
    pairs = zip(completions, answer, strict=True)
    rewards = []
    for completion, expected in pairs:
        plain = behind_hashes(text_of(completion)[-HASHES_WITHIN:]) or ""
        is_number = re.fullmatch(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", plain)
        rewards.append(_right_number(Decimal(plain) if is_number else None, expected))
    return rewards


def behind_hashes(text: str) -> str | None:
    numbers = _BEHIND_HASHES.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def chance_of_pass(n: int, c: int, k: int) -> float:
    """Return unbiased pass@k, 1 - C(n-c, k) / C(n, k), if c of n samples pass (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def think_format_reward(completions: list[Any], prompt_texts: list[str] | None = None, **kwargs: Any) -> list[float]:
    """Return for each completion 1.0 if its reasoning has TRL's format, else 0.0.

    The completion must start with ``<think>``, have no second ``<think>``, and have a ``</think>``. The first
    ``<think>`` may end the prompt instead. A message with reasoning under a separate key also gets 1.0."""
    begun = thought_begun(prompt_texts, len(completions))
    return [
        float(has_thought_apart(completion) or _THINK.match("<think>" * within + text_of(completion)) is not None)
        for completion, within in zip(completions, begun, strict=True)
    ]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Make DAPO's soft punishment of long completions (https://arxiv.org/abs/2503.14476, equation 13), as in TRL.

    With L = ``max_completion_len``, K = ``soft_punish_cache`` and n tokens in the completion, the reward is

        0                  for n <= L - K
        (L - K - n) / K    for L - K < n <= L
        -1                 for n > L

    n counts only the tokens that the model wrote. TRL also counts tokens of tools, which the model can't shorten.

    Raises:
        ValueError: ``soft_punish_cache`` isn't between 1 and ``max_completion_len``."""
    if not 1 <= soft_punish_cache <= max_completion_len:
        limits = f"from 1 to max_completion_len ({max_completion_len})"
        raise ValueError(f"soft_punish_cache is {soft_punish_cache}, but soft_punish_cache must be {limits}.")

    def soft_overlong_punishment_reward(
        completion_ids: list[list[int]], completion_mask: list[list[int]] | None = None, **kwargs: Any
    ) -> list[float]:
        lengths = map(len, completion_ids) if completion_mask is None else map(sum, completion_mask)
        free = max_completion_len - soft_punish_cache
        return [min(0.0, max(-1.0, (free - length) / soft_punish_cache)) for length in lengths]

    return soft_overlong_punishment_reward


@functools.cache
def builtin_rewards() -> dict[str, Callable[..., Any]]:
    return {
        "last_number": last_number,
        "gsm8k_reward": gsm8k_reward,
        "think_format_reward": think_format_reward,
        # TRL's script for GRPO has a reward of this name with these values.
        "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
        **{function.__name__: function for function in registry.hooks("rewards")},
    }

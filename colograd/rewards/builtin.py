"""The built-in reward functions, by the names under which a recipe finds them."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-\$?)?"  # a sign, unless it follows a digit or a word: 10-5 ends in 5
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # 1,234.5 or 1234.5
    r"|(?<![0-9.])\.[0-9]+)"  # .5
)
_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def _completion_text(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace("\u2212", "-"))  # the typographic minus sign
    return Decimal(re.sub(r"[,$]", "", found[-1])) if found else None


def last_number(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 where the last number of the completion equals the last number of the column ``answer``, else 0.0.

    Numbers are integers or decimals, with or without commas: ``#### 42`` (GSM8K), ``-5``, ``$1,234.50``, ``42.``. They
    are compared exactly, as decimals. None where ``answer`` holds no number.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        gold = _last_number(str(expected))
        rewards.append(None if gold is None else float(_last_number(_completion_text(completion)) == gold))
    return rewards


def accuracy_reward(
    completions: list[Any],
    solution: list[Any],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where math-verify finds the completion's LaTeX answer equal to the column ``solution``, else 0.0 (as TRL).

    None where the solution can't be parsed. A boxed answer is tried first; text outside LaTeX isn't an answer. What was
    parsed goes to the completions table (``gold_parsed``, ``answer_parsed``).

    Raises:
        ImportError: math-verify isn't installed.
    """
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ImportError(f"accuracy_reward needs math-verify ({error}): pip install math-verify") from error
    # math-verify's timeouts are SIGALRM, which only the main thread may use; elsewhere it warns that there are none.
    alarm = threading.current_thread() is threading.main_thread()
    if not alarm:
        for module in ("parser", "grader"):
            logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    rewards: list[float | None] = []
    golds, answers = [], []
    for completion, expected in zip(completions, solution, strict=True):
        gold = parse(str(expected), parsing_timeout=10 if alarm else None)
        golds.append(str(gold) if gold else "[unparseable]")
        if not gold:
            rewards.append(None)
            answers.append("[skipped]")
            continue
        given = parse(
            _completion_text(completion),
            extraction_config=[extraction],
            extraction_mode="first_match",
            parsing_timeout=10 if alarm else None,
        )
        rewards.append(float(verify(gold, given, timeout_seconds=5 if alarm else None)))
        answers.append(str(given) if given else "[unparseable]")
    if log_extra is not None:
        for column, values in (("solution", list(solution)), ("gold_parsed", golds), ("answer_parsed", answers)):
            log_extra(column, values)
    return rewards


def reasoning_accuracy_reward(
    completions: list[Any], solution: list[Any], reasoning_delimiters: list[str] | None = None, **kwargs: Any
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning; 0.0 where that doesn't end (as TRL).

    Args:
        reasoning_delimiters: what ends the reasoning; the first of them that occurs counts, at its last place. Default
            ``</think>``.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        text = _completion_text(completion)
        ends = [delimiter for delimiter in reasoning_delimiters or ["</think>"] if delimiter in text]
        rewards += accuracy_reward([text.split(ends[0])[-1]], [expected]) if ends else [0.0]
    return rewards


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1.0 where the completion starts with one ``<think>...</think>`` block, else 0.0 (TRL's rule)."""
    return [float(_THINK.match(_completion_text(completion)) is not None) for completion in completions]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Make DAPO's soft punishment of long completions (https://arxiv.org/abs/2503.14476, equation 13; as in TRL).

    With L = ``max_completion_len``, K = ``soft_punish_cache`` and n tokens in the completion, the reward is

        0                  for n <= L - K
        (L - K - n) / K    for L - K < n <= L
        -1                 for n > L

    Args:
        max_completion_len: tokens; usually the run's ``max_completion_length``.
        soft_punish_cache: tokens below it in which the punishment grows from 0 to -1.

    Raises:
        ValueError: ``soft_punish_cache`` isn't between 1 and ``max_completion_len``.
    """
    if not 1 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache is {soft_punish_cache}, but must be in 1 ... {max_completion_len} (max_completion_len)."
        )

    def soft_overlong_punishment_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        free = max_completion_len - soft_punish_cache
        return [min(0.0, max(-1.0, (free - len(ids)) / soft_punish_cache)) for ids in completion_ids]

    return soft_overlong_punishment_reward


BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {
    "last_number": last_number,
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    # TRL's name and values for its command line; other values: a function of your own made by the factory.
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}

"""Rewards for mathematical answers. math-verify may never end, so it runs in a process that can be killed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle

from ...rewards.answers import Verdict, after_thinking, has_thought_apart, text_of, thought_begun
from ...usercode.worker_pool import Worker, WorkerCall

LIMIT = 25.0  # Seconds for one answer. math-verify's own limits of 5 s almost always end it earlier.
LOOK_SECONDS = 0.1  # Seconds between looks for a result, so that Ctrl-C interrupts the caller.


def accuracy_reward(
    completions: list[Any],
    solution: list[Any],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return for each completion 1.0 if math-verify finds its LaTeX answer equal to the ``solution``, else 0.0.

    As in TRL, the answer is the last box. Without a box it is LaTeX behind words such as "the answer is". The reward
    is None if the solution can't be parsed. The completions table gets the columns ``solution``, ``gold_parsed`` and
    ``answer_parsed``."""
    texts = [None if completion is None else text_of(completion) for completion in completions]
    verdicts = [*map(functools.partial(compare, bare_numbers=False), texts, solution)]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
    return [None if verdict.right is None else float(verdict.right) for verdict in verdicts]


def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[Any],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return `accuracy_reward` of the text behind the reasoning, or 0.0 if the reasoning doesn't end (TRL's rule).

    Args:
        reasoning_delimiters: texts that end the reasoning, by default ``</think>``. If the completion contains several,
            the first in the list counts. The reasoning ends at this text's last occurrence."""
    answers: list[str | None] = []
    for text in map(text_of, completions):
        end = next((each for each in reasoning_delimiters or ["</think>"] if each in text), None)
        answers.append(None if end is None else text.rpartition(end)[2])
    return accuracy_reward(answers, solution, log_extra)


def math_answer_reward(
    completions: list[Any], expected_answer: list[Any], prompt_texts: list[str] | None = None, **kwargs: Any
) -> list[float | None]:
    """Return for each completion 1.0 if the answer behind its reasoning equals ``expected_answer``, else 0.0.

    As in lighteval for MATH-500 and AIME, the answer is the last box. Without a box it is the LaTeX or number behind
    "answer", or else the last LaTeX or number. The reward is None if the expected answer can't be parsed.
    """
    begun = thought_begun(prompt_texts, len(completions))
    texts = [
        after_thinking(text_of(completion), within and not has_thought_apart(completion))
        for completion, within in zip(completions, begun, strict=True)
    ]
    verdicts = map(functools.partial(compare, bare_numbers=True), texts, expected_answer)
    return [None if verdict.right is None else float(verdict.right) for verdict in verdicts]


def compare(text: str | None, gold: Any, bare_numbers: bool) -> Verdict:
    """Judge the answer in ``text``. Unfinished reasoning (None), a dead process or a time-out counts as wrong."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("rewards for mathematical answers need math-verify: pip install math-verify")
    if text is None:
        return Verdict(False, "[incomplete reasoning]", "[incomplete reasoning]")
    if gold is None or (isinstance(gold, float) and math.isnan(gold)):
        return Verdict(None, "[unparseable]", "[skipped]")
    call = WorkerCall(0, {"text": text, "gold": str(gold), "bare_numbers": bare_numbers}, None)
    worker, thread = _process_of(os.getpid())
    pending = thread.submit(worker.run, call, LIMIT, lambda: True)
    while not pending.done():
        with contextlib.suppress(TimeoutError):
            pending.result(LOOK_SECONDS)
    outcome = pending.result()
    if outcome.kind == "raised":
        raise RuntimeError(outcome.value[1])
    return outcome.value if outcome.kind == "value" else Verdict(False, str(gold), f"[{outcome.kind}]")


@functools.cache
def _process_of(pid: int) -> tuple[Worker, ThreadPoolExecutor]:
    """Return the judging process, and the thread that starts it. The process ends when this thread ends."""
    from .math_judging import judge

    return Worker([cloudpickle.dumps(judge)]), ThreadPoolExecutor(1, "colograd-mathematics")

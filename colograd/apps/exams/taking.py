"""Exams in a run: the policy's engine writes the answers, workers judge them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from ...batch import Group, Prompt, ScoredGroup
from ...engine.sampling import Sampling
from ...parallel.ranks import on_all_ranks
from ...rollout.stages import PendingRewards
from .checking import Checker
from .exam import Exam
from .results import ExamResult

# (this rank's prompts, the sampling, the judge) -> scored groups; a collective.
Collect = Callable[[Sequence[Prompt], Sampling, Callable[[Sequence[Group]], PendingRewards]], Iterable[ScoredGroup]]


def sampling_of(exam: Exam) -> Sampling:
    """Convert an exam's sampling for the engine."""
    options: dict[str, Any] = {"top_p": exam.top_p, "top_k": exam.top_k}
    if exam.stop:
        options["stop"] = list(exam.stop)
    return Sampling(exam.n, exam.max_tokens, exam.temperature, options)


def shortened(exam: Exam, tokens: int) -> Exam:
    """Limit the exam's completions to so many tokens."""
    return dataclasses.replace(exam, max_tokens=min(exam.max_tokens, tokens))


def take(
    exam: Exam, prompts: Sequence[Prompt], decode: Callable[[Group], list[str]], collect: Collect
) -> tuple[ExamResult, list[ScoredGroup]]:
    """Take an exam on all ranks. Return the result of all ranks, and this rank's groups. A collective.

    Args:
        prompts: this rank's prompts.
    """
    started = time.perf_counter()
    with on_all_ranks(f"the checker of {exam.name}"):
        checker = Checker(exam, decode)
    with closing(checker):
        groups = list(collect(prompts, sampling_of(exam), checker.submit))
    result = ExamResult.of(exam, groups, checker.counts, checker.example)
    result.seconds = time.perf_counter() - started
    return result, groups


def metrics_of(result: ExamResult) -> Mapping[str, float]:
    """Return a result for the log of a run, with its times."""
    seconds = result.seconds
    return result.metrics() | {"runtime": seconds, "samples_per_second": len(result.right) / seconds}

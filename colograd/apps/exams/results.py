"""An exam's result: the mean over questions with its 95 % interval, pass@k, lengths; joined over ranks; as a table.

Intervals are the normal approximation over questions (arXiv 2411.00640, section 2.1 and 2.2). A question's value is the
mean of its n completions; the interval is the mean ± 1.96 standard deviations of these values over the root of their
number. So the completions of a question count once, because they are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...batch import FinishReason, ScoredGroup
from ...parallel.ranks import gather
from .exam import Exam

NORMAL_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions, and half the width of its 95 % interval (NaN for a single question)."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Compute the estimate from each question's value."""
        count = len(values)
        mean = sum(values) / count
        if count < 2:
            return cls(mean, math.nan)
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, NORMAL_95 * math.sqrt(variance / count))

    def percent(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if math.isnan(self.half) else f" ± {100 * self.half:.1f}")

    def as_json(self) -> dict[str, float | None]:
        half = None if math.isnan(self.half) else self.half
        ends = (None, None) if half is None else (max(0.0, self.mean - half), min(1.0, self.mean + half))
        return {"mean": self.mean, "half_width_95": half, "low_95": ends[0], "high_95": ends[1]}


def pass_at(n: int, c: int, k: int) -> float:
    """Estimate the chance that at least one of k completions is right, if c of n are right: 1 - C(n-c, k) / C(n, k),
    which is unbiased (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(slots=True)
class ExamResult:
    """The result of an exam over all ranks' completions. Questions are in the order of the data."""

    exam: Exam
    right: dict[int, int] = field(default_factory=dict)  # right ones among each question's n completions, by its row
    tokens: int = 0  # tokens of all completions
    cut_off: int = 0  # completions that ended at their limit of tokens
    counts: Counter[str] = field(default_factory=Counter)  # checks that were late, died or raised
    example: str = ""  # the error of a check that raised
    seconds: float = 0.0

    @classmethod
    def of(cls, exam: Exam, groups: Iterable[ScoredGroup], counts: Mapping[str, int], example: str) -> ExamResult:
        """Count this rank's groups, and join all ranks' counts. A collective."""
        own = cls(exam, counts=Counter(counts), example=example)
        for scored in groups:
            own.right[scored.group.position] = int(scored.rewards.sum())
            for rollout in scored.group.rollouts:
                own.tokens += len(rollout.completion_ids)
                own.cut_off += rollout.finish_reason is not FinishReason.STOP
        whole = cls(exam)
        for part in gather(own):
            whole.right |= part.right
            whole.tokens, whole.cut_off = whole.tokens + part.tokens, whole.cut_off + part.cut_off
            whole.counts.update(part.counts)
            whole.example = whole.example or part.example
        whole.right = dict(sorted(whole.right.items()))
        return whole

    @property
    def completions(self) -> int:
        return len(self.right) * self.exam.n

    @property
    def accuracy(self) -> Estimate:
        """avg@n: the mean over questions of the share of right completions."""
        return Estimate.of([right / self.exam.n for right in self.right.values()])

    def passes(self) -> dict[int, Estimate]:
        """Compute pass@k for k = 2, 4, 8 ... n; at k = 1 it is the accuracy."""
        n = self.exam.n
        ks = [2**power for power in range(1, n.bit_length())]
        return {k: Estimate.of([pass_at(n, right, k) for right in self.right.values()]) for k in ks}

    def metrics(self) -> dict[str, float]:
        """Return metrics for the log of a run: shares, not percent."""
        accuracy = self.accuracy
        found = {"accuracy": accuracy.mean}
        if not math.isnan(accuracy.half):
            found["accuracy_ci95"] = accuracy.half
        found |= {f"pass@{k}": estimate.mean for k, estimate in self.passes().items()}
        found |= {
            "completions/mean_length": self.tokens / self.completions,
            "completions/clipped_ratio": self.cut_off / self.completions,
            "completions": float(self.completions),
        }
        return found | {f"checks/{kind}": float(count) for kind, count in self.counts.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the whole result, with the settings and the published numbers."""
        exam = self.exam
        return {
            "exam": exam.name,
            "questions": len(self.right),
            "n": exam.n,
            "sampling": {
                "temperature": exam.temperature,
                "top_p": exam.top_p,
                "top_k": exam.top_k,
                "max_tokens": exam.max_tokens,
            },
            "accuracy": self.accuracy.as_json(),
            "pass": {str(k): estimate.as_json() for k, estimate in self.passes().items()},
            "mean_length": self.tokens / self.completions,
            "cut_off": self.cut_off / self.completions,
            "checks": dict(self.counts),
            "seconds": self.seconds,
            "right": {str(row): right for row, right in self.right.items()},
            "source": exam.source,
            "published": [
                {"model": each.model, "percent": each.percent, "source": each.source, "note": each.note}
                for each in exam.published
            ],
        }


def table(results: Sequence[ExamResult]) -> list[str]:
    """Format lines for people: a row per exam, then published numbers, and failed checks."""
    rows = [("exam", "questions", "avg@n", "% right, 95 %", "pass@k", "tokens", "cut off")]
    for result in results:
        passes = ", ".join(f"@{k} {estimate.percent()}" for k, estimate in result.passes().items())
        rows.append(
            (
                result.exam.name,
                str(len(result.right)),
                f"avg@{result.exam.n}",
                result.accuracy.percent(),
                passes or "-",
                f"{result.tokens / result.completions:.0f}",
                f"{100 * result.cut_off / result.completions:.1f} %",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for result in results:
        for each in result.exam.published:
            note = f" ({each.note})" if each.note else ""
            lines.append(f"published, {result.exam.name}: {each.percent:g} for {each.model}{note}; {each.source}")
        if wrong := ", ".join(f"{count} {kind}" for kind, count in sorted(result.counts.items())):
            first = f": {result.example}" if result.example else ""
            lines.append(f"{result.exam.name}: checks that judged nothing count as wrong answers: {wrong}{first}")
    return lines

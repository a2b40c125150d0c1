"""Results of benchmarks, as table and JSON: lengths, the harness's metrics, accuracy and pass@k with 95 % intervals.

Intervals are the normal approximation mean ± 1.96 s / sqrt(n) over n questions (arXiv 2411.00640, sections 2.1 and
2.2). A question's accuracy is the mean over its completions, which aren't independent."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...batch import Group
from ...rewards.answers import chance_of_pass
from ...usercode.worker_pool import WorkerCall
from .harness import HarnessBenchmark, LoadedTask, Question

NORMAL_95 = 1.959964
Key = tuple[str, str]  # (metric, filter)


@dataclass(frozen=True, slots=True)
class Estimate:
    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        half = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), NORMAL_95 * half)

    def percent(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if math.isnan(self.half) else f" ± {100 * self.half:.1f}")


@dataclass(slots=True)
class Answer:
    """An answered question. Ranks send each other only the fields up to ``failed``."""

    task: str
    row: int
    verdicts: list[dict[Key, Any]] = field(default_factory=list)  # One per completion judged alone, or one for all.
    tokens: int = 0
    cut_off: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    question: Question | None = None
    groups: list[Group] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    calls: list[WorkerCall] = field(default_factory=list)


@dataclass(slots=True)
class TaskResult:
    loaded: LoadedTask
    answered: list[Answer]
    seconds: float = 0.0
    aggregates: dict[Key, float] = field(default_factory=dict)

    @property
    def completions(self) -> int:
        sampling = self.loaded.sampling
        return 0 if sampling is None else len(self.answered) * sampling.n

    def values(self) -> dict[Key, list[list[Any]]]:
        found: dict[Key, list[list[Any]]] = {}
        better = self.loaded.task.higher_is_better()
        for key in dict.fromkeys(key for each in self.answered for verdict in each.verdicts for key in verdict):
            numbers = all(_is_number(v[key]) for each in self.answered for v in each.verdicts if key in v)
            zero = numbers and better.get(key[0]) is not False
            of_each = ([v.get(key, 0.0) for v in each.verdicts if zero or key in v] for each in self.answered)
            found[key] = [values for values in of_each if values]
        return found

    @property
    def primary(self) -> Key | None:
        return next(iter(self.aggregates), None)

    def estimates(self) -> dict[str, Estimate]:
        """Return ``accuracy`` (the primary metric) and ``pass@k`` for k = 2, 4, 8 ... up to n.

        Both are left out unless the primary metric is a mean of values from 0 to 1. ``pass@k`` needs values 0 and 1.
        """
        key, n = self.primary, self.loaded.n or 1
        values = [] if key is None else self.values().get(key, [])
        if not values or not _are_numbers(values) or not all(0 <= each <= 1 for v in values for each in v):
            return {}
        accuracy = Estimate.of([sum(v) / len(v) for v in values])
        if not math.isclose(accuracy.mean, self.aggregates[key], abs_tol=1e-6):  # type: ignore[index]
            return {}
        ks = [2**power for power in range(1, n.bit_length()) if all(each in (0, 1) for v in values for each in v)]
        of_ks = {f"pass@{k}": Estimate.of([chance_of_pass(n, int(sum(v)), k) for v in values]) for k in ks}
        return {"accuracy": accuracy, **of_ks}

    def metrics(self) -> dict[str, float]:
        estimates = self.estimates()
        found = {name: estimate.mean for name, estimate in estimates.items()}
        if "accuracy" in estimates and not math.isnan(half := estimates["accuracy"].half):
            found["accuracy_ci95"] = half
        found |= {_name(key): value for key, value in self.aggregates.items()}
        if self.completions:
            found["completions/mean_length"] = sum(each.tokens for each in self.answered) / self.completions
            found["completions/clipped_ratio"] = sum(each.cut_off for each in self.answered) / self.completions
        found["completions"] = float(self.completions)
        kinds = Counter(kind for each in self.answered for kind, _ in each.failed)
        return found | {f"checks/{kind}": float(count) for kind, count in sorted(kinds.items())}

    def as_json(self) -> dict[str, Any]:
        sampling, task = self.loaded.sampling, self.loaded.task
        found = {
            "task": self.loaded.name,
            "version": str(task.VERSION),
            "num_fewshot": task.get_config("num_fewshot"),
            "questions": len(self.answered),
            "n": self.loaded.n or 1,
            "metrics": self.metrics(),
            "seconds": self.seconds,
        }
        if sampling is not None:
            settings = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
            found["sampling"] = settings | {name: v for name, v in sampling.options.items() if _is_number(v)}
        key: Any = self.primary
        answered = self.answered if self.estimates() else ()
        right = {str(each.row): sum(verdict.get(key, 0.0) for verdict in each.verdicts) for each in answered}
        return found | {"right": right}


@dataclass(slots=True)
class SuiteResult:
    tasks: list[TaskResult]
    groups: dict[str, dict[Key, float]]

    @classmethod
    def of(cls, benchmark: HarnessBenchmark, tasks: Sequence[TaskResult]) -> SuiteResult:
        from lm_eval.evaluator_utils import _process_results

        gathered = {}
        for each in tasks:
            raw = {
                key: [sum(v) / len(v) for v in values] if _are_numbers(values) else [*itertools.chain(*values)]
                for key, values in each.values().items()
            }
            gathered[each.loaded.name] = {"task": each.loaded.task, "raw_metrics": raw, "logged_samples": []}
        whole = _process_results(gathered, benchmark.groups, bootstrap_iters=0).metrics
        for each in tasks:
            each.aggregates = dict(_numbers(whole[each.loaded.name]))
        return cls(list(tasks), {name: dict(_numbers(whole[name])) for name in benchmark.groups})

    def metrics(self) -> dict[str, float]:
        if len(self.tasks) == 1 and not self.groups:
            return self.tasks[0].metrics()
        found: dict[str, float] = {}
        if values := next(iter(self.groups.values()), {}):
            found["accuracy"] = next(iter(values.values()))
            found |= {_name(key): value for key, value in values.items()}
        for each in self.tasks:
            found |= {f"{each.loaded.name}_{name}": value for name, value in each.metrics().items()}
        return found | {"completions": float(sum(each.completions for each in self.tasks))}


def table(results: Sequence[SuiteResult]) -> list[str]:
    rows, lines = [("task", "questions", "metric", "value")], []
    for result in (each for suite in results for each in suite.tasks):
        shown = {name: f"{value:.4g}" for name, value in result.metrics().items() if name != "accuracy_ci95"}
        shown |= {name: f"{estimate.percent()} %" for name, estimate in result.estimates().items()}
        rows += [(result.loaded.name, str(len(result.answered)), name, value) for name, value in shown.items()]
        if failed := [each for answered in result.answered for each in answered.failed]:
            about = next((f": {error}" for _, error in failed if error), "")
            lines.append(f"{result.loaded.name}: {len(failed)} failed checks count as wrong answers{about}")
    for suite in results:
        for group, values in suite.groups.items():
            rows += [(group, "", _name(key), f"{value:.4g}") for key, value in values.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown_rows = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*(row.rstrip() for row in shown_rows), *lines]


def _name(key: Key) -> str:
    metric, name = key
    return metric if name == "none" else f"{metric}/{name}"


def _numbers(metrics: dict[str, Any]) -> Iterable[tuple[Key, float]]:
    for joined, value in metrics.items():
        metric, comma, name = joined.partition(",")
        if comma and not metric.endswith("_stderr") and _is_number(value):
            yield (metric, name), float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)


def _are_numbers(values: Sequence[Sequence[Any]]) -> bool:
    return all(_is_number(each) for v in values for each in v)

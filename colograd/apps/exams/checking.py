"""`Checker`: judges completions in worker processes, one call each, while the engine samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ...batch import Group
from ...parallel import watchdog
from ...runtime import process
from ...runtime.importing import find_object
from ...usercode.calls import PendingCalls
from ...usercode.worker_pool import WorkerCall, WorkerPool
from .exam import Exam

MOST_WORKERS = 8  # default limit


class Checker:
    """The checks of an exam's completions: 1.0 for a right answer, else 0.0.

    A check that is late, dies or raises counts as a wrong answer, and is counted.

    Args:
        decode: returns a group's texts.
        workers: number of processes; None: as many as this rank has cores, at most MOST_WORKERS.

    Raises:
        ValueError: the exam's checker can't be found, or can't run in a worker.
    """

    def __init__(self, exam: Exam, decode: Callable[[Group], list[str]], workers: int | None = None) -> None:
        check = find_object(exam.check, f"The checker of the exam {exam.name!r}", callable)
        self.exam, self.decode = exam, decode
        self.counts: Counter[str] = Counter()  # checks that were late, died or raised
        self.example = ""  # the error of a check that raised
        size = workers or min(MOST_WORKERS, process.cpu_threads())
        self._pool = WorkerPool("exams", {exam.name: check}, size, exam.seconds)
        if exam.name not in self._pool:
            raise ValueError(f"The checker of {exam.name!r} runs in no worker: {'; '.join(self._pool.notes)}")

    def submit(self, groups: Sequence[Group]) -> Checking:
        """Start the checks of all completions of some groups."""
        calls = [
            self._pool.submit(self.exam.name, {"text": text, "answer": group.example["answer"]})
            for group in groups
            for text in self.decode(group)
        ]
        return Checking(self, calls)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


class Checking(PendingCalls[WorkerCall]):
    """The pending verdicts on some completions: `PendingRewards` of rollout/stages.py."""

    def __init__(self, checker: Checker, calls: Sequence[WorkerCall]) -> None:
        super().__init__(calls)
        self._checker = checker

    def result(self) -> torch.Tensor:
        """Wait for the verdicts, [completions, 1] float32."""
        watchdog.progress(f"the checks of {self._checker.exam.name}")
        return torch.tensor([[self._verdict(call)] for call in self._calls], dtype=torch.float32).reshape(-1, 1)

    def _verdict(self, call: WorkerCall) -> float:
        outcome = call.result()
        watchdog.progress()
        if outcome.kind == "value":
            return float(bool(outcome.value))
        self._checker.counts[outcome.kind] += 1
        if outcome.kind == "raised":
            self._checker.example = self._checker.example or outcome.value[0]
        return 0.0

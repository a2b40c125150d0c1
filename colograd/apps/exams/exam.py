"""`Exam`: one benchmark. `ExamSpec`: an exam as named in a command line or a recipe."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPEC = re.compile(r"(?P<name>[\w-]+)(\[:(?P<limit>\d+)\])?(@(?P<n>\d+))?(=(?P<data>.+))?")


@dataclass(frozen=True, slots=True)
class Published:
    """A published accuracy to compare with."""

    model: str
    percent: float
    source: str  # URL
    note: str = ""  # differences from the exam's settings


@dataclass(frozen=True, slots=True)
class Question:
    """A question for the model, and the right answer."""

    messages: tuple[dict[str, str], ...]  # the last one may be the beginning of the model's answer
    answer: str

    @classmethod
    def of_user(cls, text: str, answer: str) -> Question:
        """Make a question of one user message."""
        return cls(({"role": "user", "content": text},), answer)


@dataclass(frozen=True, slots=True)
class Exam:
    """A benchmark: its data, question, sampling, checker, and numbers to expect."""

    name: str
    path: str  # the dataset's id on the Hub
    config: str | None
    split: str
    columns: tuple[str, ...]  # columns that `ask` reads
    ask: Callable[[Mapping[str, Any], int], Question]  # (row, its number) -> question
    check: str  # import path of f(text, answer) -> bool
    source: str  # URL of question, sampling and checker
    published: tuple[Published, ...]
    n: int = 1  # completions per question
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024  # limit of a completion
    stop: tuple[str, ...] = ()
    seconds: float = 60.0  # limit of one check

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.n > 1:
            raise ValueError(
                f"{self.name}: {self.n} completions per question at temperature 0 would be equal: ask for 1, or raise "
                "the temperature."
            )


@dataclass(frozen=True, slots=True)
class ExamSpec:
    """An exam with the requested changes: ``NAME[:ROWS]@N=DATA``, where only the name is required."""

    exam: Exam
    limit: int | None = None  # only so many first rows
    data: str | None = None  # a file or folder with the dataset's columns, instead of the Hub's dataset

    @classmethod
    def parse(cls, text: str, exams: Mapping[str, Exam], **changes: Any) -> ExamSpec:
        """Read ``gsm8k``, ``math500[:100]``, ``aime24@16``, ``gsm8k=test.jsonl`` or a mixture of these.

        Args:
            changes: new values of the exam's fields, in addition to the text's.

        Raises:
            ValueError: no such exam, or another form.
        """
        match = SPEC.fullmatch(text)
        name = match["name"] if match else re.split(r"[\[@=]", text)[0]
        if name not in exams:
            near = difflib.get_close_matches(name, exams, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name!r} is no exam: there are {', '.join(exams)}.{meant}")
        if match is None:
            raise ValueError(
                f"The exam {text!r} can't be read: write NAME, NAME[:ROWS] for the first rows, NAME@N for N "
                f"completions per question, NAME=FILE for data of your own, or all of it: {name}[:100]@4=FILE.jsonl."
            )
        if match["limit"] == "0" or match["n"] == "0":
            raise ValueError(f"The exam {text!r} asks for 0 rows or completions, but both are at least 1.")
        exam = dataclasses.replace(exams[name], **({"n": int(match["n"])} if match["n"] else {}) | changes)
        return cls(exam, None if match["limit"] is None else int(match["limit"]), match["data"])


def parse_specs(texts: Sequence[str], exams: Mapping[str, Exam], **changes: Any) -> dict[str, ExamSpec]:
    """Parse several specs, by their exams' names. Raises ValueError for a bad spec, or an exam that is named twice."""
    found: dict[str, ExamSpec] = {}
    for text in texts:
        spec = ExamSpec.parse(text, exams, **changes)
        if spec.exam.name in found:
            raise ValueError(f"The exam {spec.exam.name!r} is named twice: name it once.")
        found[spec.exam.name] = spec
    return found

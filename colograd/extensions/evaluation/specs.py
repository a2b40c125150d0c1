"""`TaskSpec`: the parsed name of a task of lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_FORM = re.compile(r"(?P<name>[^\[\]@=]+)(\[:(?P<limit>\d+)\])?(@(?P<n>\d+))?")
YAML = (".yaml", ".yml")
FORMER = {"math500": "minerva_math500", "gpqa": "gpqa_diamond_cot_zeroshot"}
INSTALL = "pip install --no-deps lm_eval==0.4.13 sacrebleu portalocker colorama lxml evaluate"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task, group or tag of the harness: ``NAME``, ``NAME[:ROWS]``, ``NAME@N`` or ``NAME[:ROWS]@N``."""

    name: str
    limit: int | None = None
    n: int | None = None  # Completions per question, judged one by one.

    @classmethod
    def parse(cls, text: str) -> TaskSpec:
        """Parse a text such as ``gsm8k``, ``mmlu[:100]``, ``aime24@16`` or ``tasks/mine.yaml[:100]@4``."""
        if (match := _FORM.fullmatch(text)) is None:
            own = (
                " For data of your own write a YAML file with the task's prompt and metrics, `dataset_path: json` and "
                "`dataset_kwargs: {data_files: {test: FILE}}`."
            )
            raise ValueError(
                f"The task {text!r} can't be read: write NAME, NAME[:100] for the first 100 rows, NAME@4 for 4 "
                f"completions per question, or FILE.yaml for a task of your own.{own if '=' in text else ''}"
            )
        if match["limit"] == "0" or match["n"] == "0":
            raise ValueError(f"The task {text!r} requests 0 rows or completions, but must request at least 1.")
        limit, n = (None if match[each] is None else int(match[each]) for each in ("limit", "n"))
        return cls(FORMER.get(match["name"], match["name"]), limit, n)


def names_of(texts: Sequence[str]) -> Mapping[str, str]:
    """Return a dict: a task's name in metrics -> the task's text in settings. Raise if two tasks share a name."""
    check_harness()
    names: dict[str, str] = {}
    for text in texts:
        TaskSpec.parse(text)
        name = re.split(r"[\[@]", text)[0]  # A renamed task keeps its former name in metrics: `eval_math500_accuracy`.
        name = Path(name).stem if name.endswith(YAML) else name
        if name in names:
            raise ValueError(f"The task {name!r} is named twice: name each task once, and each YAML file differently.")
        names[name] = text
    return names


def check_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        remedy = f"{INSTALL}, or pip install 'colograd[eval]'"
        raise ValueError(f"Benchmarks are tasks of lm-evaluation-harness, but lm_eval is missing: {remedy}.")

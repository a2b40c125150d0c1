"""An exam's questions as prompts: read from the Hub or from files of the same columns, tokenised as a run's prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

from datasets import Dataset

from ...data import PromptDataset, PromptRules, tokenize_prompts
from ...data.columns import listed
from ...data.sources import load_source
from .exam import Exam, ExamSpec, Question


class ExamPrompts(PromptDataset):
    """The prompts of an exam; column ``answer`` has the right answers."""

    exam: Exam

    @classmethod
    def of(cls, spec: ExamSpec, rules: PromptRules) -> ExamPrompts:
        """Read and tokenise the questions; a question that is too long for the context is an error.

        Raises:
            ValueError: no such dataset or columns, or a row of another form than the exam's.
        """
        rules = dataclasses.replace(rules, name=f"the exam {spec.exam.name}", overlong="error")
        made = tokenize_prompts(load_questions(spec, plain=not _has_template(rules)), rules)
        found = cls(made.dataset, made._token_ids, made._ends, made.dropped, rules)
        found.exam = spec.exam
        return found

    @property
    def generations(self) -> int:
        """Completions per question."""
        return self.exam.n


def load_questions(spec: ExamSpec, plain: bool = False) -> Dataset:
    """Load the exam's questions, with the columns ``prompt`` and ``answer``.

    Args:
        plain: concatenate the messages' texts, for a model without a chat template.
    """
    exam = spec.exam
    loaded = _rows(spec)
    lacking = [column for column in exam.columns if column not in loaded.column_names]
    if lacking:
        raise ValueError(
            f"The exam {exam.name!r} needs the column {listed(lacking)}; {spec.data or exam.path} has "
            f"{listed(loaded.column_names)}. Give data of the shape of {exam.path}."
        )
    count = len(loaded) if spec.limit is None else min(spec.limit, len(loaded))
    rows = [_row(exam.ask(loaded[number], number), plain) for number in range(count)]
    if not rows:
        raise ValueError(f"The exam {exam.name!r} has no rows in {spec.data or exam.path}: there is nothing to ask.")
    return Dataset.from_list(rows)


def _rows(spec: ExamSpec) -> Dataset:
    exam = spec.exam
    if spec.data is None:
        loaded: Any = load_source(exam.path, exam.config, {}, (exam.split,), streaming=False)
    else:
        loaded = load_source(spec.data, None, {}, (exam.split,), streaming=False)
    if not isinstance(loaded, dict):
        return loaded
    if exam.split in loaded:
        return loaded[exam.split]
    if len(loaded) == 1:  # the user's own file has a split `train`
        return next(iter(loaded.values()))
    raise ValueError(
        f"The exam {exam.name!r} is asked from the split {exam.split!r}; {spec.data or exam.path} has {listed(loaded)}."
    )


def _row(question: Question, plain: bool) -> dict[str, Any]:
    messages = list(question.messages)
    prompt = "\n\n".join(message["content"] for message in messages) if plain else messages
    return {"prompt": prompt, "answer": question.answer}


def _has_template(rules: PromptRules) -> bool:
    return bool(getattr(rules.tokenizer, "chat_template", None) or "chat_template" in rules.chat_template_kwargs)

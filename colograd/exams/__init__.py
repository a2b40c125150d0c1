"""Exams: published benchmarks by name, as `colograd eval` and a run's `exams` take them.

    EXAMS["gsm8k"] -> load_questions -> ExamPrompts -> roll_out (engine, Checker) -> ExamResult

An exam is an `Exam` in a file of its own, or a row where it differs by data alone: a dataset of the Hub with the split
and columns, the question that is put to the model, the sampling, the checker of an answer, the source of all these, and
published numbers to expect. A checker is a function ``f(text, answer) -> bool`` by import path; it runs in a worker
process, where it may hang or die.

Modules that checkers lie in import neither torch nor this project's heavy parts, since workers import them.
"""

from .exam import Exam, ExamSpec, Published, Question

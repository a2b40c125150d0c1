"""Exams: published benchmarks by name, as `colograd eval` and a run's `exams` take them.

    EXAMS["gsm8k"] -> load_questions -> ExamPrompts -> roll_out (engine, Checker) -> ExamResult

An exam is an `Exam` in its own file, or a row if it differs only in data. It has a dataset of the Hub with split and
columns, the question for the model, the sampling, the checker of an answer, their source, and published numbers to
expect. A checker is a function ``f(text, answer) -> bool`` by import path; it runs in a worker process, where it may
hang or die.

Modules with checkers import neither torch nor this project's heavy parts, since workers import them.
"""

from .exam import Exam, ExamSpec, Published, Question

"""The exams by name. A new one: its file (or its row in a file), and a line here."""

from __future__ import annotations

from .competition_math import AIME24, AIME25, MATH500
from .exam import Exam
from .gpqa import GPQA
from .gsm8k import GSM8K
from .mbpp import MBPP, MBPP_PLUS

EXAMS: dict[str, Exam] = {exam.name: exam for exam in (GSM8K, MATH500, AIME24, AIME25, GPQA, MBPP, MBPP_PLUS)}

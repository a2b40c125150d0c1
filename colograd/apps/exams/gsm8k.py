"""GSM8K (arXiv 2110.14168), 1,319 questions: with the question and judgement of verl and SkyRL, to reproduce their
numbers.

The question ends with their instruction, completions are greedy, and the answer is the text behind the last ``####`` in
the completion's last 300 characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...rewards.answers import HASHES_WITHIN, behind_hashes
from ...rewards.answers import gsm8k_reward as reward
from .exam import Exam, Published, Question

__all__ = ["GSM8K", "ask", "check", "reward", "training_rows"]

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
VERL = "https://github.com/volcengine/verl/blob/main/docs/algo/baseline.md"
QWEN = "https://qwenlm.github.io/blog/qwen2.5-llm/"


def ask(row: Mapping[str, Any], number: int) -> Question:
    """Convert a row of openai/gsm8k: columns ``question`` and ``answer``, which ends with ``#### number``."""
    gold = behind_hashes(str(row["answer"]))
    if gold is None:
        raise ValueError(f"gsm8k, row {number}: the answer {row['answer']!r} doesn't end with `#### NUMBER`.")
    return Question.of_user(f"{row['question']} {INSTRUCTION}", gold)


def check(text: str, answer: str) -> bool:
    """Return whether the number after the last ``####`` has the answer's characters, without commas (``42.`` isn't
    42)."""
    return behind_hashes(text[-HASHES_WITHIN:]) == answer


def training_rows(path: str = "openai/gsm8k") -> Any:
    """Load the 7,473 training problems in the exam's form: columns ``prompt`` and ``answer``.

    Args:
        path: a folder or Hub id with the dataset's files, or one file of rows.
    """
    from datasets import Dataset

    from ...data.sources import load_source

    loaded = load_source(path, "main" if path == "openai/gsm8k" else None, {}, ("train",), streaming=False)
    rows = loaded["train"] if isinstance(loaded, dict) else loaded
    asked = [ask(row, number) for number, row in enumerate(rows)]
    return Dataset.from_list([{"prompt": list(each.messages), "answer": each.answer} for each in asked])


GSM8K = Exam(
    name="gsm8k",
    path="openai/gsm8k",
    config="main",
    split="test",
    columns=("question", "answer"),
    ask=ask,
    check="colograd.apps.exams.gsm8k:check",
    source="https://github.com/volcengine/verl/blob/main/examples/data_preprocess/gsm8k.py",
    published=(
        Published("Qwen2.5-0.5B-Instruct", 49.6, QWEN, "another question, 4 examples in the prompt"),
        Published("Qwen2.5-1.5B-Instruct after GRPO with LoRA", 77.9, VERL),
        Published("Qwen2.5-3B-Instruct after GRPO with LoRA", 86.1, VERL),
        Published(
            "Qwen2.5-1.5B-Instruct after GRPO, 140 steps",
            79.6,
            "https://github.com/NovaSky-AI/SkyRL/blob/main/docs/content/docs/recipes/overview.mdx",
        ),
    ),
)

"""GSM8K (arXiv 2110.14168) in verl's form: the question with an instruction, and the final number as the answer."""

from __future__ import annotations

from typing import Any

from .answers import behind_hashes, gsm8k_reward

reward = gsm8k_reward
PATH = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def rows(split: str = "train", path: str = PATH) -> Any:
    """Load a split of GSM8K with the columns ``prompt`` (one user message) and ``answer`` (the number as a text).

    Args:
        split: ``train`` with 7,473 problems, or ``test`` with 1,319 problems.
        path: a folder or Hub id, or one file of rows, which counts as the split ``train``.

    Returns:
        A `datasets.Dataset`, or None if ``path`` has no such split."""
    from datasets import Dataset

    from ..data.loading import load_source

    loaded = load_source(path, "main" if path == PATH else None, {}, ("train",), streaming=False)
    if split not in loaded:
        return None
    converted = []
    for number, row in enumerate(loaded[split]):
        gold = behind_hashes(str(row["answer"]))
        if gold is None:
            problem = f"gsm8k, row {number}: the answer {row['answer']!r} has no `#### NUMBER`"
            raise ValueError(f"{problem}. Set `path` (a key of `dataset_kwargs`) to a dataset in GSM8K's form.")
        prompt = [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}]
        converted.append({"prompt": prompt, "answer": gold})
    return Dataset.from_list(converted)


def training_rows(path: str = PATH) -> Any:
    return rows("train", path)

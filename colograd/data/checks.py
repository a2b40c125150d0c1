"""What loading and tokenising both check."""

from __future__ import annotations

from typing import Any

from datasets import Dataset


def check_has_length(dataset: Any, name: str) -> None:
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset, because the order of "
            "prompts needs a length. Load it without streaming, or make one with "
            "Dataset.from_list(list(dataset.take(n)))."
        )


def listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"

"""Rows for an agent. They need no prompt, because the agent's program writes the prompts."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset

from ...data.columns import EMPTY, columns_of


def with_prompts(dataset: Any) -> Any:
    """Return a dataset, a dict of datasets, or None. Add a column ``prompt`` with empty prompts if it is missing."""
    if isinstance(dataset, dict):
        given: dict[str, Any] = dataset
        return {name: with_prompts(part) for name, part in given.items()}
    if isinstance(dataset, Dataset | IterableDataset) and "prompt" not in columns_of(dataset):
        return dataset.map(lambda row: {"prompt": EMPTY})
    return dataset

"""What loading and tokenising both check."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset


def check_has_length(dataset: Any, name: str) -> None:
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset.")


def check_dataset(dataset: Any, name: str) -> None:
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset, or an IterableDataset."
        )


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """The columns; of a stream that doesn't know them, the first row's."""
    return list(dataset.column_names or next(iter(dataset), {}))


def listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"

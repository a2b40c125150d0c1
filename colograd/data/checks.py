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


def check_columns(dataset: Dataset | IterableDataset, name: str) -> None:
    """Nothing of the dataset may be lost in silence: images, or what a transform would make of its rows.

    Raises:
        ValueError: with the remedy.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"{name} has a transform (with_transform or set_transform), which runs whenever a row is read, but prompts "
            "are tokenised once: apply it with map."
        )
    if images := sorted({"image", "images"} & {*columns_of(dataset)}):
        raise ValueError(
            f"{name} has the column {images[0]!r}, but this version trains on text alone: remove the column, or rename "
            "it if only the reward functions need it."
        )


def listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"

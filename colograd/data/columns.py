"""What loading and tokenising ask of a dataset: its kind, its columns, and that nothing of it is lost in silence."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset


def check_has_length(dataset: Any, name: str) -> None:
    """Raises ValueError where it isn't a dataset whose rows can be counted."""
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset.")


def check_dataset(dataset: Any, name: str) -> None:
    """Raises ValueError where it is no dataset, be it whole or streamed."""
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset, or an IterableDataset."
        )


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """The columns; where a stream doesn't know them, those of its first row."""
    return list(dataset.column_names or next(iter(dataset), {}))


def check_columns(dataset: Dataset | IterableDataset, name: str) -> None:
    """Refuse what would be lost in silence: images, and what a transform makes of the rows when they are read.

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
    """The names for a message, quoted."""
    return ", ".join(repr(name) for name in names) or "none"

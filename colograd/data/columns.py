"""What loading and tokenising ask of a dataset: its kind, its columns, and that nothing of it is lost in silence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset


def check_dataset(dataset: Any, name: str) -> None:
    """Raises ValueError where it is no dataset, be it whole or streamed."""
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset, or an IterableDataset."
        )


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """The columns; where a stream doesn't know them, those of its first row."""
    return list(dataset.column_names or next(iter(dataset), {}))


def check_prompt_column(columns: Iterable[str], name: str) -> None:
    """Raises ValueError where none of the columns holds the prompts."""
    if "prompt" not in columns:
        raise ValueError(
            f"{name} has no column 'prompt'; it has {listed(columns)}. Rename the one that holds the prompts "
            "(dataset_prompt_column in a recipe)."
        )


def check_columns(dataset: Dataset | IterableDataset, name: str, images: bool = False) -> None:
    """Refuse what would be lost in silence: images, and what a transform makes of the rows when they are read.

    Args:
        images: the model takes them.

    Raises:
        ValueError: with the remedy.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"{name} has a transform (with_transform or set_transform), which runs whenever a row is read, but prompts "
            "are tokenised once: apply it with map. (Tool calls and chat_template_kwargs need no transform to remove "
            "the keys that Arrow adds with None; other nested columns need on_mixed_types='use_json'.)"
        )
    if not images:
        check_no_images(columns_of(dataset), name)


def check_no_images(columns: Iterable[str], name: str) -> None:
    """Raises ValueError where a column holds images."""
    if found := sorted({"image", "images"} & {*columns}):
        raise ValueError(
            f"{name} has the column {found[0]!r}, but the model reads text alone: choose a vision-language model (see "
            "docs/guide/images.md), remove the column, or rename it if only the reward functions need it."
        )


def by_column(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns, None where a row lacks one: rows of a stream may differ in their keys."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def listed(names: Iterable[str]) -> str:
    """The names for a message, quoted."""
    return ", ".join(repr(name) for name in names) or "none"

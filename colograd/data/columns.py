"""Checks of a dataset before it is tokenised: its kind, its columns, and that no data is lost silently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

IMAGES = ("images", "image")  # columns with a row's images
EMPTY = [{"role": "user", "content": ""}]  # the prompt of rows whose prompts are written during the rollout


def check_dataset(dataset: Any, name: str) -> None:
    """Raise ValueError if ``dataset`` is neither a Dataset nor an IterableDataset."""
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"{name} is of type {type(dataset).__name__}, but must be a datasets.Dataset or an IterableDataset: "
            "convert it (`Dataset.from_list`, say)."
        )


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """Return the column names. If a stream doesn't know its columns, the first row's keys are returned."""
    return list(dataset.column_names or next(iter(dataset), {}))


def check_prompt_column(columns: Iterable[str], name: str) -> None:
    """Raise ValueError if no column is named ``prompt``."""
    if "prompt" not in columns:
        raise ValueError(
            f"{name} has no column 'prompt'; it has {listed(columns)}. Rename the one that holds the prompts "
            "(dataset_prompt_column in a recipe)."
        )


def check_columns(dataset: Dataset | IterableDataset, name: str, images: bool = False) -> None:
    """Refuse data that would be lost silently: images for a text model, and a transform that runs at each read."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"{name} has a transform (with_transform or set_transform), which runs whenever a row is read, but prompts "
            "are tokenised once: apply it with map. (Tool calls and chat_template_kwargs need no transform to remove "
            "the keys that Arrow adds with None; other nested columns need on_mixed_types='use_json'.)"
        )
    if not images:
        check_no_images(columns_of(dataset), name)


def check_no_images(columns: Iterable[str], name: str) -> None:
    """Raise ValueError if a column holds images."""
    if found := sorted({*IMAGES} & {*columns}):
        raise ValueError(
            f"{name} has the column {found[0]!r}, but the model reads text alone: choose a vision-language model (see "
            "docs/guide/images.md), remove the column, or rename it if only the reward functions need it."
        )


def by_column(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Convert rows into columns, with None where a row lacks one: rows of a stream may differ in their keys."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def listed(names: Iterable[str]) -> str:
    """Quote and join names for a message."""
    return ", ".join(repr(name) for name in names) or "none"

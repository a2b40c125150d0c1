"""Checks of a dataset's type and columns, and of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

IMAGES = ("images", "image")
EMPTY = [{"role": "user", "content": ""}]


def check_dataset(dataset: Any, name: str) -> None:
    if not isinstance(dataset, Dataset | IterableDataset):
        rule = "must be a datasets.Dataset or an IterableDataset: convert it"
        raise ValueError(f"{name} is of type {type(dataset).__name__}, but {rule}.")


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """Return the column names. For a stream without known columns, return the keys of the first row."""
    return list(dataset.column_names or next(iter(dataset), {}))


def check_prompt_column(columns: Iterable[str], name: str, column: str = "prompt") -> None:
    if column not in columns:
        remedy = "rename the column that holds the prompts (in a recipe: set dataset_prompt_column)"
        raise ValueError(f"{name} has no column {column!r}; it has {listed(columns)}: {remedy}.")


def check_columns(dataset: Dataset | IterableDataset, name: str, images: bool = False) -> None:
    """Raise a ValueError if ``dataset`` has a transform, or has a column of images while ``images`` is false."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"{name} has a transform (with_transform or set_transform), but prompts are tokenised once: apply the "
            "transform with `dataset.map`. If the transform only removes keys with the value None, remove the "
            "transform: Colograd removes these keys from messages and `chat_template_kwargs`. Other columns stay free "
            "of these keys if you build the dataset with `Dataset.from_list(rows, on_mixed_types='use_json')`."
        )
    if not images:
        check_no_images(columns_of(dataset), name)


def check_no_images(columns: Iterable[str], name: str) -> None:
    if found := sorted({*IMAGES} & {*columns}):
        remedy = "choose a vision-language model (docs/guide/images.md), or remove or rename the column"
        raise ValueError(f"{name} has the column {found[0]!r}, but the model reads text alone: {remedy}.")


def whole(dataset: Any, name: str) -> Dataset:
    check_dataset(dataset, name)
    if isinstance(dataset, Dataset):
        return dataset
    rows = list(dataset.with_format(None))
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    features = dataset.features if rows else None
    return Dataset.from_dict(columns, features=features, on_mixed_types="use_json")


def by_row(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def size_of(tokenizer: Any) -> int:
    """Return the number of embedding rows that the tokenizer needs."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_rows(ids: Iterable[int], rows: int, tokenizer: Any, where: str) -> None:
    if (highest := max(ids, default=0)) >= rows:
        raise ValueError(
            f"{where} has the token {tokenizer.convert_ids_to_tokens(highest)!r} ({highest}), but the model's "
            f"embedding has {rows:,} rows: use the model's tokenizer, or train from a folder that you save after "
            f"model.resize_token_embeddings({size_of(tokenizer)})."
        )


def surplus_rows(tokenizer: Any, rows: int) -> Iterator[str]:
    if (tokens := size_of(tokenizer)) < rows:
        yield (
            f"tokenizer: {rows - tokens:,} of the model's {rows:,} rows have no token; sampled ones "
            f"({tokens} and above) have no text, and `sampling/unknown_tokens` counts them"
        )

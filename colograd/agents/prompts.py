"""Rows for an agent, which needs no prompt in them: its program writes what the model is asked."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, IterableDataset

from ..data.columns import columns_of
from ..rollout.toolbox import EMPTY


def with_prompts(dataset: Any) -> Any:
    """A dataset, a dict of some, or None: where there is no column ``prompt``, with an empty one."""
    if isinstance(dataset, dict):
        given: dict[str, Any] = dataset
        return {name: with_prompts(part) for name, part in given.items()}
    if isinstance(dataset, Dataset | IterableDataset) and "prompt" not in columns_of(dataset):
        return dataset.map(lambda row: {"prompt": EMPTY})
    return dataset

"""Load one dataset by its name: a local file or folder, a Hub id, or the import path of a function that returns one."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from ..runtime.hub import check_dataset_name
from ..runtime.importing import find_object
from .columns import check_dataset

FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_source(name: str, config: str | None, kwargs: dict[str, Any], splits: Sequence[str], streaming: bool) -> Any:
    """Load a dataset by its name, or a dict of its splits. With ``streaming`` return IterableDatasets."""
    function = _function(name)
    if function is not None:
        loaded = _call(function, name, kwargs if config is None else {"name": config, **kwargs}, splits)
    else:
        loaded = _load_stored(name, config, kwargs | ({"streaming": True} if streaming else {}))
    if not streaming:
        return loaded
    parts = loaded if isinstance(loaded, dict) else {"": loaded}
    parts = {name: part.to_iterable_dataset() if isinstance(part, Dataset) else part for name, part in parts.items()}
    return parts if isinstance(loaded, dict) else parts[""]


def _load_stored(name: str, config: str | None, kwargs: dict[str, Any]) -> Any:
    path = Path(name)
    builder = FILE_BUILDERS.get(path.suffix.lower())
    try:
        if any((path / mark).exists() for mark in ("dataset_info.json", "state.json", "dataset_dict.json")):
            return load_from_disk(name, **{key: value for key, value in kwargs.items() if key != "streaming"})
        if path.is_file():
            if builder is None:
                raise ValueError(f"it ends in {path.suffix!r}: convert the file to one of {', '.join(FILE_BUILDERS)}")
            return load_dataset(builder, data_files=name, **kwargs)
        if builder is not None and not path.is_dir():
            raise ValueError(f"there is no such file: give a path relative to {os.getcwd()}, or an absolute one")
        if not path.is_dir():
            check_dataset_name(name, kwargs.get("cache_dir"))
        return load_dataset(name, config, **kwargs)
    # `datasets` raises OSError for a missing or unreachable dataset, and StopIteration for an empty file.
    except (OSError, ValueError, TypeError, DatasetsError, StopIteration) as error:
        if builder is not None and path.is_file() and (problem := _problem_of_file(path, error)):
            raise ValueError(f"The dataset {name!r} can't be loaded: {problem}.") from error
        why = (error.__cause__ or error) if isinstance(error, DatasetsError) else error
        raise ValueError(
            f"The dataset {name!r} can't be loaded: {why}. Give a local file or folder, an import path "
            "`package.module:function`, or an id on the Hub, which needs a connection or a filled cache."
        ) from error


def _problem_of_file(path: Path, error: Exception) -> str:
    """Return the fault of a file that `datasets` can't load, with its line number; an empty text if unknown."""
    if not path.stat().st_size or "corresponds to no data" in str(error):
        return "the file has no rows: write some into it"
    if path.suffix.lower() != ".jsonl":
        return ""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                kind = type(json.loads(line)).__name__ if line.strip() else "dict"
                problem = "" if kind == "dict" else f"is of type {kind}"
            except ValueError as error:
                problem = f"isn't JSON ({error})"
            if problem:
                return (
                    f"line {number} {problem}: write one JSON object per line, such as "
                    '{"prompt": "2 + 2 =", "answer": "4"}'
                )
    return ""


def _function(name: str) -> Callable[..., Any] | None:
    explicit = ":" in name and "://" not in name
    dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if Path(name).exists() or not (explicit or dotted):
        return None
    try:
        found = find_object(name, "The dataset", callable)
    except ValueError as error:
        why = error.__cause__  # If the error has no cause, the module exists but lacks the attribute.
        absent = why is None or (isinstance(why, ModuleNotFoundError) and name.startswith(f"{why.name}."))
        if explicit or not absent:
            raise
        return None
    if callable(found):
        return found
    raise ValueError(
        f"The dataset {name!r} is of type {type(found).__name__}, but must be a function that returns the Dataset."
    )


def _call(function: Callable[..., Any], name: str, kwargs: dict[str, Any], splits: Sequence[str]) -> Any:
    signature = inspect.signature(function)
    takes_split = "split" in signature.parameters and "split" not in kwargs
    results: dict[str, Any] = {}
    for split in splits if takes_split else splits[:1]:
        given = {**kwargs, "split": split} if takes_split else kwargs
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(
                f"The dataset function {name}{signature} was given {given}: {error}. Set dataset_kwargs."
            ) from error
        result = function(**given)
        if isinstance(result, dict):  # A DatasetDict is a dict.
            return result
        if result is None and results:  # The dataset function has no test split.
            continue
        check_dataset(result, f"The result of the dataset function {name}")
        results[split] = result
    return results if takes_split else results[splits[0]]

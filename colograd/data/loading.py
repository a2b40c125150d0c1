"""Datasets by name: a Hub id, a local file or folder, a function, or a mixture of these."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset, load_from_disk

from ..config import ScriptArguments
from .checks import check_dataset, columns_of, listed

FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
MIXTURE_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")


def load_datasets(script: ScriptArguments) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on, both with a ``prompt`` column; None where there is no test split.
    Iterable ones where streaming is asked for, or a dataset function returns them.

    Raises:
        ValueError: no such dataset, train split or prompt column; the message names what there is.
    """
    if bool(script.dataset_name) == bool(script.datasets):
        given = "both were given" if script.dataset_name else "neither was given"
        raise ValueError(
            f"Exactly one of dataset_name and datasets says what to train on; {given}. dataset_name is a Hub id, a "
            "local file or folder, or an import path `package.module:function`; datasets is a mixture of such."
        )
    train, test = _load_mixture(script) if script.datasets else _load_named(script)
    train = _with_prompts(train, script, "the train split")
    return train, None if test is None else _with_prompts(test, script, "the test split")


def _load_named(script: ScriptArguments) -> tuple[Any, Any]:
    name, wanted = str(script.dataset_name), (script.dataset_train_split, script.dataset_test_split)
    if script.test_split_size is not None:
        raise ValueError(
            f"test_split_size={script.test_split_size} holds rows of a mixture out; with dataset_name, name a split "
            "to evaluate on (dataset_test_split), or give the dataset as the one part of `datasets`."
        )
    kwargs = _from_json(script.dataset_kwargs, dict, "dataset_kwargs", '{"size": 100}') or {}
    loaded = _load(name, script.dataset_config, kwargs, wanted, script.dataset_streaming)
    if not isinstance(loaded, dict):  # one split: asked for by name, or all there is
        return loaded, None
    train, test = (loaded.get(split) for split in wanted)
    if train is None:
        raise ValueError(
            f"{name} has no split {wanted[0]!r}; it has {listed(loaded)}. Set dataset_train_split to one of these."
        )
    return train, test


def _load_mixture(script: ScriptArguments) -> tuple[Any, Any]:
    """The parts one after the other, less ``test_split_size`` rows that are held out (the same in every run)."""
    entries = _from_json(script.datasets, list, "datasets", '[{"path": "org/name", "split": "train"}]')
    if script.streaming and script.test_split_size is not None:
        raise ValueError(
            f"test_split_size is {script.test_split_size}, but a streamed mixture has no length of which rows could be "
            "held out: remove it, or streaming."
        )
    parts = [_load_part(entry, index, script.streaming) for index, entry in enumerate(entries)]
    parts = _shares(parts, [entry.get("fraction") for entry in entries])
    try:
        whole = concatenate_datasets(parts)
    except ValueError as error:
        columns = "; ".join(f"{i}: {listed(columns_of(part))}" for i, part in enumerate(parts))
        raise ValueError(
            f"The parts of `datasets` don't fit together ({error}). Their columns are {columns}. Keep what they "
            "share with `columns`."
        ) from error
    if script.test_split_size is None:
        return whole, None
    size = script.test_split_size
    try:
        halves = whole.train_test_split(test_size=size if size < 1 else int(size), seed=0)
    except ValueError as error:
        rule = "give a share between 0 and 1, or fewer rows"
        raise ValueError(f"test_split_size={size} doesn't fit {len(whole)} rows: {rule}.") from error
    return halves["train"], halves["test"]


def _shares(parts: list[Any], fractions: list[Any]) -> list[Any]:
    """The first rows of each part, such that it has its share of the mixture and none is repeated, as TRL has it."""
    if all(fraction is None for fraction in fractions):
        return parts
    if any(fraction is None or fraction < 0 for fraction in fractions) or not sum(fractions):
        raise ValueError(f"`fraction` is {fractions} in `datasets`: give each part a share, or none of them.")
    if not all(isinstance(part, Dataset) for part in parts):
        raise ValueError("`fraction` is given in `datasets`, but a streamed part has no length: remove one of the two.")
    shares = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share)
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]


def _load_part(entry: Any, index: int, streaming: bool) -> Any:
    where = f"datasets[{index}]"
    if not isinstance(entry, dict) or "path" not in entry or set(entry) - set(MIXTURE_KEYS):
        raise ValueError(
            f"{where} is {entry!r}; it must be a mapping with `path` and any of {', '.join(MIXTURE_KEYS[1:])}."
        )
    path, split = str(entry["path"]), entry.get("split") or "train"
    kwargs = {key: entry[key] for key in ("data_dir", "data_files") if entry.get(key) is not None}
    loaded = _load(path, entry.get("name"), kwargs, (split,), streaming)
    if isinstance(loaded, dict):
        if split not in loaded:
            raise ValueError(
                f"{where}: {path} has no split {split!r}; it has {listed(loaded)}. Set `split` to one of these."
            )
        loaded = loaded[split]
    check_dataset(loaded, where)
    there = columns_of(loaded)
    columns = entry.get("columns") or there
    if missing := [column for column in columns if column not in there]:
        raise ValueError(f"{where}: {path} has no column {listed(missing)}; it has {listed(there)}.")
    return loaded.select_columns(list(columns))


def _load(name: str, config: str | None, kwargs: dict[str, Any], splits: Sequence[str], streaming: bool) -> Any:
    function = _function(name)
    if function is not None:
        loaded = _call(function, name, kwargs if config is None else {"name": config, **kwargs}, splits)
    else:
        loaded = _load_stored(name, config, kwargs | ({"streaming": True} if streaming else {}))
    if streaming and isinstance(loaded, dict):
        return {split: _streamed(part) for split, part in loaded.items()}
    return _streamed(loaded) if streaming else loaded


def _streamed(dataset: Any) -> Any:
    """A dataset that is there already, as one that is read while training."""
    return dataset.to_iterable_dataset() if isinstance(dataset, Dataset) else dataset


def _load_stored(name: str, config: str | None, kwargs: dict[str, Any]) -> Any:
    """A dataset from a local file or folder, or from the Hub."""
    path = Path(name)
    builder = FILE_BUILDERS.get(path.suffix.lower())
    try:
        if path.is_dir():
            if any((path / mark).exists() for mark in ("dataset_info.json", "state.json", "dataset_dict.json")):
                return load_from_disk(name, **{key: value for key, value in kwargs.items() if key != "streaming"})
            return load_dataset(name, config, **kwargs)
        if path.is_file():
            if builder is None:
                raise ValueError(f"it ends in {path.suffix!r}; files may be {', '.join(FILE_BUILDERS)}")
            return load_dataset(builder, data_files=name, **kwargs)
        if builder is not None:
            raise ValueError(f"there is no such file (looked from {os.getcwd()})")
        return load_dataset(name, config, **kwargs)
    except (OSError, ValueError, TypeError) as error:  # what is missing or unreachable is an OSError too
        raise ValueError(
            f"The dataset {name!r} can't be loaded: {error}. It may be a local file or folder, an import path "
            "`package.module:function`, or the id of a dataset on the Hub (which needs a connection or a filled "
            "cache)."
        ) from error


def _function(name: str) -> Callable[..., Any] | None:
    """The function that an import path names; None where ``name`` isn't an import path."""
    if Path(name).exists():
        return None
    explicit = ":" in name and "://" not in name
    module_name, _, attribute = name.partition(":") if explicit else name.rpartition(".")
    if not explicit and (not all(part.isidentifier() for part in name.split(".")) or "." not in name):
        return None
    if os.getcwd() not in sys.path:  # a launched script's path starts at the script's folder, not where the user stands
        sys.path.append(os.getcwd())
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(
            f"{error.name}."
        ):  # it is there, what it imports isn't: that message is best
            raise
        if explicit:
            raise ValueError(f"The dataset {name!r}: there is no module {error.name!r} to import.") from error
        return None
    except AttributeError as error:
        if explicit:
            raise ValueError(f"The dataset {name!r}: {error}.") from error
        return None
    if callable(found):
        return found
    raise ValueError(
        f"The dataset {name!r} is of type {type(found).__name__}; it must be a function returning a Dataset."
    )


def _call(function: Callable[..., Any], name: str, kwargs: dict[str, Any], splits: Sequence[str]) -> Any:
    """What the function returns; asked for each of ``splits``, if it has a parameter ``split``, as a dict of them."""
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
        if isinstance(result, dict):  # DatasetDict is one
            return result
        if result is None and results:  # there is no test split
            continue
        check_dataset(result, f"The result of the dataset function {name}")
        results[split] = result
    return results if takes_split else results[splits[0]]


def _from_json(value: Any, kind: type, name: str, example: str) -> Any:
    """``value``, parsed if it is JSON text; None stays None."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is {value!r}, which isn't JSON ({error}); write it as in {example}") from error
    if parsed is None or isinstance(parsed, kind):
        return parsed
    raise ValueError(f"{name} is {value!r}; it must be a {kind.__name__}, as in {example}")


def _with_prompts(dataset: Any, script: ScriptArguments, name: str) -> Any:
    """The dataset with its prompts in ``prompt``, behind the system prompt if there is one."""
    check_dataset(dataset, name)
    column, there = script.dataset_prompt_column, columns_of(dataset)
    if column not in there:
        raise ValueError(
            f"{name} has no column {column!r}; it has {listed(there)}. Set dataset_prompt_column to "
            "the one that holds the prompts."
        )
    if column != "prompt" and "prompt" not in there:
        dataset = dataset.rename_column(column, "prompt")
    elif column != "prompt" and (
        isinstance(dataset, IterableDataset) or list(dataset["prompt"]) != list(dataset[column])
    ):
        raise ValueError(
            f"{name} has a column 'prompt' beside dataset_prompt_column={column!r}, and they differ: remove one."
        )
    if script.system_prompt is None:
        return dataset
    system = {"system": {"role": "system", "content": script.system_prompt}}
    if isinstance(dataset, IterableDataset):
        return dataset.map(_put_system_first, fn_kwargs=system)
    # Nothing to cache: it is quick, and ranks that share a cache would write the same file.
    return dataset.map(
        _put_system_first,
        fn_kwargs=system,
        keep_in_memory=True,
        load_from_cache_file=False,
        desc="system prompt",
    )


def _put_system_first(row: dict[str, Any], system: dict[str, str]) -> dict[str, Any]:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return {"prompt": [system, {"role": "user", "content": prompt}]}
    if not isinstance(prompt, list) or any(m.get("role") == "system" for m in prompt if isinstance(m, dict)):
        return {"prompt": prompt}
    return {"prompt": [system, *prompt]}

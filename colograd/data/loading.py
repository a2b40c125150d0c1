"""Load a run's datasets by name: a local file or folder, a Hub id, or the import path of a function."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from ..config import ScriptArguments
from ..runtime.hub import check_dataset_name
from ..runtime.importing import find_object
from .columns import check_dataset, check_prompt_column, columns_of, listed

MIXTURE_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction", "source")
FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_datasets(script: ScriptArguments) -> tuple[Any, Any]:
    """Return (training dataset, evaluation dataset or None). Streamed datasets are IterableDatasets."""
    if bool(script.dataset_name) == bool(script.datasets):
        given = "both were given" if script.dataset_name else "neither was given"
        raise ValueError(
            f"Either `dataset_name` or `datasets` must be set, but {given}. Set `dataset_name` to a Hub id, a local "
            "file or folder, or an import path `package.module:function`. Or set `datasets` to a list of datasets, "
            'such as [{"path": "org/name"}].'
        )
    if script.datasets:
        train, test = _load_mixture(script)
    else:
        name, wanted = str(script.dataset_name), (script.dataset_train_split, script.dataset_test_split)
        if script.test_split_size is not None:
            remedy = "remove it and set dataset_test_split, or set `datasets` to a list of this one dataset"
            raise ValueError(f"test_split_size={script.test_split_size} works only with `datasets`: {remedy}.")
        kwargs = _from_json(script.dataset_kwargs, dict, "dataset_kwargs", '{"size": 100}') or {}
        loaded = load_source(name, script.dataset_config, kwargs, wanted, script.dataset_streaming)
        if loaded.get(wanted[0]) is None:
            raise ValueError(
                f"{name} has no split {wanted[0]!r}; it has {listed(loaded)}. Set dataset_train_split to one of them."
            )
        train, test = loaded[wanted[0]], loaded.get(wanted[1])
    train = _with_prompts(train, script, "the train split")
    return train, None if test is None else _with_prompts(test, script, "the test split")


def _load_mixture(script: ScriptArguments) -> tuple[Any, Any]:
    entries = _from_json(script.datasets, list, "datasets", '[{"path": "org/name", "split": "train"}]')
    if script.streaming and script.test_split_size is not None:
        why = "a streamed mixture has no length: remove `test_split_size` or `streaming`"
        raise ValueError(f"test_split_size is {script.test_split_size}, but {why}.")
    parts = [_load_part(entry, index, script.streaming) for index, entry in enumerate(entries)]
    fractions = [entry.get("fraction") for entry in entries]
    if any(fraction is not None for fraction in fractions):
        # As in TRL: each part gives its first rows, as many as the fractions allow without repeating a row.
        if not all(isinstance(one, int | float) and 0 <= one < math.inf for one in fractions) or not sum(fractions):
            remedy = "set a positive number in every entry, or remove `fraction` from all entries"
            raise ValueError(f"`fraction` is {fractions} in `datasets`: {remedy}.")
        if not all(isinstance(part, Dataset) for part in parts):
            raise ValueError(
                "`fraction` is set in `datasets`, but a stream has no length: remove `fraction` or `streaming`."
            )
        shares = [fraction / sum(fractions) for fraction in fractions]
        total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share)
        parts = [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
    try:
        whole = concatenate_datasets(parts)
    except ValueError as error:
        columns = "; ".join(f"{i}: {listed(columns_of(part))}" for i, part in enumerate(parts))
        raise ValueError(
            f"The entries of `datasets` can't be concatenated ({error}): convert columns of the same name to the same "
            f"type, or leave these columns out with `columns`. Columns by entry: {columns}."
        ) from error
    if script.test_split_size is None:
        return whole, None
    size = script.test_split_size
    try:
        halves = whole.train_test_split(test_size=size if size < 1 else int(size), seed=0)
    except ValueError as error:
        rule = f"set a share between 0 and 1, or fewer than {len(whole)} rows"
        raise ValueError(f"test_split_size={size} doesn't fit {len(whole)} rows: {rule}.") from error
    return halves["train"], halves["test"]


def _load_part(entry: Any, index: int, streaming: bool) -> Any:
    where = f"datasets[{index}]"
    if not isinstance(entry, dict) or "path" not in entry or set(entry) - set(MIXTURE_KEYS):
        rule = f"must be a mapping with `path`, and optionally {', '.join(MIXTURE_KEYS[1:])}: remove other keys"
        raise ValueError(f"{where} is {entry!r}, but {rule}.")
    path, split = str(entry["path"]), entry.get("split") or "train"
    kwargs = {key: entry[key] for key in ("data_dir", "data_files") if entry.get(key) is not None}
    loaded = load_source(path, entry.get("name"), kwargs, (split,), streaming)
    if split not in loaded:
        raise ValueError(
            f"{where}: {path} has no split {split!r}; it has {listed(loaded)}. Set `split` to one of them."
        )
    check_dataset(loaded[split], where)
    present = columns_of(loaded[split])
    wanted = entry.get("columns") or present
    if missing := [column for column in wanted if column not in present]:
        raise ValueError(f"{where}: {path} has no column {listed(missing)}: choose from {listed(present)}.")
    kept = loaded[split].select_columns(list(wanted))
    if (source := entry.get("source")) is None:
        return kept
    if "source" in wanted:
        raise ValueError(
            f"{where} sets `source`, but {path} already has a column 'source': remove the setting, or leave the column "
            "out with `columns`."
        )
    if isinstance(kept, Dataset):
        return kept.add_column("source", [str(source)] * len(kept))
    return kept.map(lambda row: {"source": str(source)})


def _from_json(value: Any, kind: type, name: str, example: str) -> Any:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is {value!r}, which isn't JSON ({error}): write the value as in {example}") from error
    if parsed is None or isinstance(parsed, kind):
        return parsed
    raise ValueError(f"{name} is {value!r}, but must be a {kind.__name__}: write the value as in {example}")


def _with_prompts(dataset: Any, script: ScriptArguments, name: str) -> Any:
    check_dataset(dataset, name)
    column, present = script.dataset_prompt_column, columns_of(dataset)
    makes_prompts = bool(script.agent or script.environment_factory) and script.system_prompt is None
    if makes_prompts and column == "prompt" and column not in present:
        return dataset
    check_prompt_column(present, name, column)
    if column != "prompt" and "prompt" not in present:
        dataset = dataset.rename_column(column, "prompt")
    elif column != "prompt" and (
        isinstance(dataset, IterableDataset) or list(dataset["prompt"]) != list(dataset[column])
    ):
        raise ValueError(
            f"`dataset_prompt_column` is {column!r}, but {name} also has a column 'prompt' whose prompts may differ: "
            "remove the column 'prompt', or remove `dataset_prompt_column`."
        )
    if script.system_prompt is None:
        return dataset
    system = {"role": "system", "content": script.system_prompt}

    def put_system_first(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return {"prompt": [system, {"role": "user", "content": prompt}]}
        if not isinstance(prompt, list) or any(m.get("role") == "system" for m in prompt if isinstance(m, dict)):
            return {"prompt": prompt}
        return {"prompt": [system, *prompt]}

    # The new prompts aren't cached, because ranks that share a cache would write the same file.
    uncached = {"desc": "system prompt", "keep_in_memory": True, "load_from_cache_file": False}
    return dataset.map(put_system_first, **({} if isinstance(dataset, IterableDataset) else uncached))


def load_source(
    name: str, config: str | None, kwargs: dict[str, Any], splits: Sequence[str], streaming: bool
) -> dict[str, Any]:
    """Load the dataset ``name``. Return its splits by name. A dataset without splits becomes split ``splits[0]``."""
    if (function := _function(name)) is not None:
        loaded = _call(function, name, kwargs if config is None else {"name": config, **kwargs}, splits)
    else:
        loaded = _load_stored(name, config, kwargs | ({"streaming": True} if streaming else {}))
    parts = loaded if isinstance(loaded, dict) else {splits[0]: loaded}
    if not streaming:
        return parts
    return {key: each.to_iterable_dataset() if isinstance(each, Dataset) else each for key, each in parts.items()}


def _load_stored(name: str, config: str | None, kwargs: dict[str, Any]) -> Any:
    path = Path(name)
    builder = FILE_BUILDERS.get(path.suffix.lower())
    try:
        if any((path / mark).exists() for mark in ("dataset_info.json", "state.json", "dataset_dict.json")):
            return load_from_disk(name, **{key: value for key, value in kwargs.items() if key != "streaming"})
        if path.is_file():
            if builder is None:
                raise ValueError(f"the name ends in {path.suffix!r}: convert the file to {' or '.join(FILE_BUILDERS)}")
            return load_dataset(builder, data_files=name, **kwargs)
        if builder is not None and not path.is_dir():
            raise ValueError(f"there is no such file: give a path relative to {os.getcwd()}, or an absolute one")
        if not path.is_dir():
            check_dataset_name(name, kwargs.get("cache_dir"))
        return load_dataset(name, config, **kwargs)
    # `datasets` raises OSError for a missing dataset, StopIteration for an empty file.
    except (OSError, ValueError, TypeError, DatasetsError, StopIteration) as error:
        if builder is not None and path.is_file() and (problem := _problem_of_file(path, error)):
            raise ValueError(f"The dataset {name!r} can't be loaded: {problem}.") from error
        why = (error.__cause__ or error) if isinstance(error, DatasetsError) else error
        raise ValueError(
            f"The dataset {name!r} can't be loaded: {why}. Give a local file or folder, an import path "
            "`package.module:function`, or a Hub id. A Hub id needs a network connection or a cached copy."
        ) from error


def _problem_of_file(path: Path, error: Exception) -> str:
    if not path.stat().st_size or "corresponds to no data" in str(error):
        return "the file has no rows: write some into it"
    rule = 'write one JSON object per line, such as {"prompt": "2 + 2 =", "answer": "4"}'
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines if path.suffix.lower() == ".jsonl" else (), start=1):
            try:
                kind = type(json.loads(line)).__name__ if line.strip() else "dict"
            except ValueError as error:
                return f"line {number} isn't JSON ({error}): {rule}"
            if kind != "dict":
                return f"line {number} is of type {kind}: {rule}"
    return ""


def _function(name: str) -> Callable[..., Any] | None:
    explicit = ":" in name and "://" not in name
    dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if Path(name).exists() or not (explicit or dotted):
        return None
    try:
        found = find_object(name, "The dataset", callable)
    except ValueError as error:
        why = error.__cause__  # An error without a cause: the module exists, but lacks the function.
        absent = why is None or (isinstance(why, ModuleNotFoundError) and name.startswith(f"{why.name}."))
        if explicit or not absent:
            raise
        return None
    if callable(found):
        return found
    raise ValueError(
        f"The dataset {name!r} is of type {type(found).__name__}, but must be a function that returns the Dataset."
    )


def _call(function: Callable[..., Any], name: str, kwargs: dict[str, Any], splits: Sequence[str]) -> dict[str, Any]:
    signature = inspect.signature(function)
    takes_split = "split" in signature.parameters and "split" not in kwargs
    results: dict[str, Any] = {}
    for split in splits if takes_split else splits[:1]:
        given = {**kwargs, "split": split} if takes_split else kwargs
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(
                f"The dataset function {name}{signature} can't be called with {given}: {error}. Change "
                "`dataset_kwargs` or `dataset_config`, or the function's entry in `datasets`."
            ) from error
        result = function(**given)
        if isinstance(result, dict):
            return result
        if result is None and results:
            continue
        check_dataset(result, f"The result of the dataset function {name}")
        results[split] = result
    return results

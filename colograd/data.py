"""Datasets and prompts: load, chat template, lengths, the order of prompts and its position.

    ScriptArguments -> load_datasets -> Dataset -> tokenize_prompts -> PromptDataset
                                                                           |
                   one item = this rank's prompts of one optimizer step <- PromptLoader <- StepOrder

Prompts are tokenised once, before training. Their order is a pure function of (seed, epoch), without a global
generator: a resumed run takes the same prompts, and any number of ranks takes the same prompts in the same step.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch
from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk
from torch.utils.data import DataLoader, Sampler

from .batch import Prompt
from .config import ScriptArguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
MIXTURE_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns")
ROWS_AT_ONCE = 1000  # tokenised together


# -- Loading


def load_datasets(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """The rows to train on and those to evaluate on, both with a ``prompt`` column; None where there is no test split.

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


def _load_named(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    name, wanted = str(script.dataset_name), (script.dataset_train_split, script.dataset_test_split)
    if script.test_split_size is not None:
        raise ValueError(
            f"test_split_size={script.test_split_size} holds rows of a mixture out; with dataset_name, name a split to "
            "evaluate on (dataset_test_split), or give the dataset as the one part of `datasets`."
        )
    kwargs = _from_json(script.dataset_kwargs, dict, "dataset_kwargs", '{"size": 100}') or {}
    function = _function(name)
    if function is None:
        loaded = _load_stored(name, script.dataset_config, kwargs)
    else:
        kwargs = kwargs if script.dataset_config is None else {"name": script.dataset_config, **kwargs}
        loaded = _call(function, name, kwargs, wanted)
    if not isinstance(loaded, dict):  # one split: asked for by name, or all there is
        return loaded, None
    train, test = (loaded.get(split) for split in wanted)
    if train is None:
        raise ValueError(
            f"{name} has no split {wanted[0]!r}; it has {_listed(loaded)}. Set dataset_train_split to one of these."
        )
    return train, test


def _load_mixture(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """The parts one after the other, less ``test_split_size`` rows that are held out (the same in every run)."""
    entries = _from_json(script.datasets, list, "datasets", '[{"path": "org/name", "split": "train"}]')
    parts = [_load_part(entry, index) for index, entry in enumerate(entries)]
    try:
        whole = concatenate_datasets(parts)
    except ValueError as error:
        columns = "; ".join(f"{i}: {_listed(part.column_names)}" for i, part in enumerate(parts))
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


def _load_part(entry: Any, index: int) -> Dataset:
    where = f"datasets[{index}]"
    if not isinstance(entry, dict) or "path" not in entry or set(entry) - set(MIXTURE_KEYS):
        raise ValueError(
            f"{where} is {entry!r}; it must be a mapping with `path` and any of {', '.join(MIXTURE_KEYS[1:])}."
        )
    path, split = str(entry["path"]), entry.get("split") or "train"
    kwargs = {key: entry[key] for key in ("data_dir", "data_files") if entry.get(key) is not None}
    function = _function(path)
    if function is None:
        loaded = _load_stored(path, entry.get("name"), kwargs)
    else:
        loaded = _call(
            function, path, kwargs if entry.get("name") is None else {"name": entry["name"], **kwargs}, (split,)
        )
    if isinstance(loaded, dict):
        if split not in loaded:
            raise ValueError(
                f"{where}: {path} has no split {split!r}; it has {_listed(loaded)}. Set `split` to one of these."
            )
        loaded = loaded[split]
    _check_has_length(loaded, where)
    columns = entry.get("columns")
    if columns is None:
        return loaded
    if missing := [column for column in columns if column not in loaded.column_names]:
        raise ValueError(f"{where}: {path} has no column {_listed(missing)}; it has {_listed(loaded.column_names)}.")
    return loaded.select_columns(list(columns))


def _load_stored(name: str, config: str | None, kwargs: dict[str, Any]) -> Any:
    """A dataset from a local file or folder, or from the Hub."""
    path = Path(name)
    builder = FILE_BUILDERS.get(path.suffix.lower())
    try:
        if path.is_dir():
            if any((path / mark).exists() for mark in ("dataset_info.json", "state.json", "dataset_dict.json")):
                return load_from_disk(name, **kwargs)
            return load_dataset(name, config, **kwargs)
        if path.is_file():
            if builder is None:
                raise ValueError(f"it ends in {path.suffix!r}; files may be {', '.join(FILE_BUILDERS)}")
            return load_dataset(builder, data_files=name, **kwargs)
        if builder is not None:
            raise ValueError(f"there is no such file (looked from {os.getcwd()})")
        return load_dataset(name, config, **kwargs)
    except (OSError, ValueError) as error:  # datasets' own errors for what is missing or unreachable are OSErrors
        raise ValueError(
            f"The dataset {name!r} can't be loaded: {error}. It may be a local file or folder, an import path "
            "`package.module:function`, or the id of a dataset on the Hub (which needs a connection or a filled cache)."
        ) from error


def _function(name: str) -> Callable[..., Any] | None:
    """The function that an import path names; None where ``name`` isn't an import path."""
    explicit = ":" in name and not Path(name).exists() and "://" not in name
    module_name, _, attribute = name.partition(":") if explicit else name.rpartition(".")
    if not explicit and (not all(part.isidentifier() for part in name.split(".")) or "." not in name):
        return None
    if os.getcwd() not in sys.path:  # a launched script's path starts at the script's folder, not where the user stands
        sys.path.append(os.getcwd())
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        inner = error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}."))
        if inner:  # the module is there, and what it imports is not: its own message says it best
            raise
        if explicit:
            raise ValueError(f"The dataset {name!r}: there is no module {error.name!r} to import.") from error
        return None
    except AttributeError as error:
        if explicit:
            raise ValueError(f"The dataset {name!r}: {error}.") from error
        return None
    if not callable(found):
        raise ValueError(
            f"The dataset {name!r} is a {type(found).__name__}; it must be a function that returns a Dataset."
        )
    return found


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
        _check_has_length(result, f"what the dataset function {name} returned")
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


def _with_prompts(dataset: Any, script: ScriptArguments, name: str) -> Dataset:
    """The dataset with its prompts in ``prompt``, behind the system prompt if there is one."""
    _check_has_length(dataset, name)
    column = script.dataset_prompt_column
    if column not in dataset.column_names:
        raise ValueError(
            f"{name} has no column {column!r}; it has {_listed(dataset.column_names)}. Set dataset_prompt_column to "
            "the one that holds the prompts."
        )
    if column != "prompt" and "prompt" not in dataset.column_names:
        dataset = dataset.rename_column(column, "prompt")
    elif column != "prompt" and list(dataset["prompt"]) != list(dataset[column]):
        raise ValueError(
            f"{name} has a column 'prompt' beside dataset_prompt_column={column!r}, and they differ: remove one."
        )
    if script.system_prompt is None:
        return dataset
    system = {"role": "system", "content": script.system_prompt}
    # Nothing to cache: it is quick, and ranks that share a cache would write the same file.
    return dataset.map(
        _put_system_first,
        fn_kwargs={"system": system},
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


def _check_has_length(dataset: Any, name: str) -> None:
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{name} is a {type(dataset).__name__}; it must be a datasets.Dataset, because the order of prompts needs "
            "a length. Load it without streaming, or make one with Dataset.from_list(list(dataset.take(n)))."
        )


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"


# -- Tokens


class PromptDataset(torch.utils.data.Dataset):
    """Prompts with their tokens; made by `tokenize_prompts`.

    ``dataset`` holds the rows that are kept, ``num_dropped`` says how many were too long. An index is (row, position).
    """

    def __init__(self, dataset: Dataset, token_ids: np.ndarray, ends: np.ndarray, num_dropped: int) -> None:
        """token_ids: [sum P] int32, one prompt after the other; ends: [rows + 1] int64, starting with 0."""
        assert len(ends) == len(dataset) + 1 and ends[-1] == len(token_ids), (len(ends), len(dataset), len(token_ids))
        self.dataset = dataset
        self.num_dropped = num_dropped
        self._token_ids, self._ends = token_ids, ends

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Prompt:
        row, position = key
        ids = self._token_ids[self._ends[row] : self._ends[row + 1]]
        return Prompt(example=self.dataset[row], prompt_ids=tuple(ids.tolist()), position=position)

    def prompts(self, start: int = 0) -> list[Prompt]:
        """Every row in order, at positions ``start`` and on (evaluation)."""
        return [self[row, start + row] for row in range(len(self))]


def tokenize_prompts(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    overlong: str,
    chat_template_kwargs: dict[str, Any],
    name: str,
) -> PromptDataset:
    """Tokenise each row's ``prompt`` once: conversations through the chat template, plain text as the tokenizer does.

    A conversation that ends with an assistant's message is continued. A row's own ``chat_template_kwargs`` come first.

    Args:
        max_prompt_tokens: the longest prompt.
        overlong: what becomes of longer ones: ``drop`` (counted in ``num_dropped``) or ``error``.
        name: what messages call the dataset.

    Raises:
        ValueError: no usable dataset, a row that isn't a prompt, is empty or (with ``error``) too long, or none left.
    """
    assert overlong in ("drop", "error"), overlong
    _check_has_length(dataset, name)
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"{name} has no column 'prompt'; it has {_listed(dataset.column_names)}. Rename the one that holds the "
            "prompts (dataset_prompt_column in a recipe)."
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows: there is nothing to sample from.")
    dataset = dataset.with_format(None)
    wanted = dataset.select_columns([c for c in ("prompt", "chat_template_kwargs") if c in dataset.column_names])
    kept: list[int] = []
    chunks, lengths = [], [0]
    for first in range(0, len(dataset), ROWS_AT_ONCE):
        batch = wanted[first : first + ROWS_AT_ONCE]
        for row, ids in enumerate(_encode(batch, tokenizer, chat_template_kwargs, name, first), start=first):
            if not ids:
                raise ValueError(
                    f"{name}, row {row}: the prompt {batch['prompt'][row - first]!r} has no tokens; remove it."
                )
            if len(ids) <= max_prompt_tokens:
                kept.append(row)
                chunks.append(np.asarray(ids, dtype=np.int32))
                lengths.append(len(ids))
            elif overlong == "error":
                raise ValueError(
                    f"{name}, row {row}: the prompt has {len(ids)} tokens, over the limit of {max_prompt_tokens}. "
                    "Shorten it, raise max_prompt_tokens or vllm_max_model_length, or set overlong_prompts to drop."
                )
    if not kept:
        raise ValueError(
            f"{name}: all {len(dataset)} prompts are over the limit of {max_prompt_tokens} tokens. Raise "
            "max_prompt_tokens or vllm_max_model_length."
        )
    num_dropped = len(dataset) - len(kept)
    rows = dataset.select(kept) if num_dropped else dataset
    return PromptDataset(rows, np.concatenate(chunks), np.cumsum(lengths, dtype=np.int64), num_dropped)


def _encode(
    batch: dict[str, list[Any]], tokenizer: Any, shared: dict[str, Any], name: str, first: int
) -> list[list[int]]:
    """Token ids of each row of a batch whose first row has the number ``first``."""
    prompts, own = batch["prompt"], batch.get("chat_template_kwargs") or [None] * len(batch["prompt"])
    ids: list[list[int]] = [[]] * len(prompts)
    groups: dict[
        str, tuple[dict[str, Any], list[int]]
    ] = {}  # rows with equal arguments go through the template together
    plain = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            plain.append(index)
            continue
        _check_conversation(prompt, f"{name}, row {first + index}")
        # A struct column fills the keys that a row doesn't give with None.
        mine = {key: value for key, value in (own[index] or {}).items() if value is not None}
        continues = prompt[-1]["role"] == "assistant"
        arguments = {"add_generation_prompt": not continues, "continue_final_message": continues, **shared, **mine}
        groups.setdefault(repr(sorted(arguments.items())), (arguments, []))[1].append(index)
    if plain:
        for index, row in zip(plain, tokenizer([prompts[i] for i in plain]).input_ids, strict=True):
            ids[index] = row
    for arguments, rows in groups.values():
        if not getattr(tokenizer, "chat_template", "its own") and "chat_template" not in arguments:
            raise ValueError(
                f"{name}, row {first + rows[0]}: the prompt is a conversation, and {tokenizer.name_or_path} has no chat "
                "template. Use an instruction-tuned model, set tokenizer.chat_template, or give plain text."
            )
        encoded = _apply_template(tokenizer, [prompts[i] for i in rows], arguments, name, [first + i for i in rows])
        for index, row in zip(rows, encoded, strict=True):
            ids[index] = row
    return ids


def _apply_template(
    tokenizer: Any, conversations: list[Any], arguments: dict[str, Any], name: str, rows: list[int]
) -> list[list[int]]:
    cleaned = [
        [{key: value for key, value in m.items() if value is not None or key == "content"} for m in messages]
        for messages in conversations
    ]
    try:
        return tokenizer.apply_chat_template(cleaned, tokenize=True, return_dict=False, **arguments)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        if len(rows) > 1:  # one by one, to find the row
            return [
                _apply_template(tokenizer, [c], arguments, name, [r])[0] for c, r in zip(cleaned, rows, strict=True)
            ]
        raise ValueError(
            f"{name}, row {rows[0]}: the chat template refuses the prompt {cleaned[0]!r}: {error}"
        ) from error


def _check_conversation(prompt: Any, where: str) -> None:
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    ):
        example = '[{"role": "user", "content": "..."}]'
        raise ValueError(
            f"{where}: the prompt is {prompt!r}; it must be a text, or a list of messages such as {example}."
        )


# -- Order


class StepOrder(Sampler[list[tuple[int, int]]]):
    """Which prompts each optimizer step takes on this rank; one item is [(row, position), ...] of one step.

    An epoch is a row of rounds. A round is ``steps_per_generation`` different steps, taken ``num_iterations`` times.
    Example with 2 prompts a step, steps_per_generation=2, num_iterations=2: ab cd ab cd | ef gh ef gh. What doesn't
    fill a round is left out of the epoch (another remainder in each, if shuffled).
    """

    def __init__(
        self,
        num_rows: int,
        prompts_per_step: int,
        rank: int,
        world_size: int,
        steps_per_generation: int = 1,
        num_iterations: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """``prompts_per_step`` counts all ranks. Raises ValueError where the rows don't fill one round."""
        assert prompts_per_step % world_size == 0, f"{prompts_per_step} prompts on {world_size} ranks"
        assert 0 <= rank < world_size, (rank, world_size)
        self.num_rounds = num_rows // (prompts_per_step * steps_per_generation)
        if self.num_rounds == 0:
            raise ValueError(
                f"The dataset has {num_rows} prompts; one generation takes {prompts_per_step * steps_per_generation} "
                f"(prompts_per_step={prompts_per_step} times steps_per_generation={steps_per_generation}). Lower one "
                "of the two, or add prompts."
            )
        self.num_rows, self.prompts_per_step = num_rows, prompts_per_step
        self.rank, self.world_size = rank, world_size
        self.steps_per_generation, self.num_iterations = steps_per_generation, num_iterations
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order and the positions of this epoch, counted from 0."""
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return self.num_rounds * self.steps_per_generation * self.num_iterations

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        rows = self._rows_in_order()
        per_rank = self.prompts_per_step // self.world_size
        start = self.epoch * self.num_rounds * self.steps_per_generation * self.prompts_per_step
        for round_index in range(self.num_rounds):
            for _ in range(self.num_iterations):
                for step in range(self.steps_per_generation):
                    first = (
                        round_index * self.steps_per_generation + step
                    ) * self.prompts_per_step + self.rank * per_rank
                    yield [(rows[index], start + index) for index in range(first, first + per_rank)]

    def _rows_in_order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self.num_rows)
        # Hashed, so that neighbouring seeds and epochs share nothing; 63 bits, which manual_seed takes.
        digest = hashlib.sha256(f"{self.seed} {self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randperm(self.num_rows, generator=generator).tolist()


class PromptLoader(DataLoader):
    """The training dataloader: one item is the list of `Prompt` of one optimizer step on this rank.

    A plain DataLoader over a batch sampler, so that `accelerate.skip_first_batches` resumes in the middle of an epoch.
    """

    def __init__(self, dataset: PromptDataset, order: StepOrder) -> None:
        # Its own generator: starting an epoch would otherwise draw a number from the global one.
        super().__init__(dataset, batch_sampler=order, collate_fn=list, num_workers=0, generator=torch.Generator())

    def set_epoch(self, epoch: int) -> None:
        """Forwarded to the order."""
        self.batch_sampler.set_epoch(epoch)

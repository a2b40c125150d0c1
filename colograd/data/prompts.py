"""Tokenise the prompts of a dataset's rows, with the chat template for conversations. Drop or refuse long prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import torch
from datasets import Dataset

from ..batch import ModelInput, Prompt
from ..parallel import watchdog
from .columns import by_row, check_columns, check_prompt_column, check_rows, whole
from .messages import check_prompt, template_messages, without_nones

ROWS_AT_ONCE = 1000
NAMED = 5
COLUMNS = ("prompt", "chat_template_kwargs")


@dataclass(eq=False)
class PromptDataset(torch.utils.data.Dataset):
    """A dataset's rows with tokenised prompts. ``self[row, position]`` is a `Prompt`, ``self[row]`` a row."""

    dataset: Dataset
    token_ids: Any  # Ids of prompts, concatenated, int32 [sum P]. None: `rules.reader` makes each prompt on request.
    ends: np.ndarray  # Where prompts begin and end in ``token_ids``, int64 [rows + 1], from 0.
    dropped: dict[int, int]  # Original row index of a too long prompt -> its number of tokens.
    rules: PromptRules
    # An extension's object that chooses each step's prompts. `order(config)` returns the `StepOrder`. Checkpoints store
    # the state `saved`, and `load(state)` restores it. `missing` says why a checkpoint may lack the state.
    choice: Any = None

    def dropped_line(self) -> str:
        rules, total = self.rules, len(self.dropped) + len(self)
        first = ", ".join(f"row {row} ({tokens} tokens)" for row, tokens in [*self.dropped.items()][:NAMED])
        return (
            f"data: {len(self.dropped)} of {total} prompts are too long and were dropped: of {rules.name}, with a "
            f"limit of {rules.max_prompt_tokens} tokens, {first}{', ...' * (len(self.dropped) > NAMED)}"
        )

    @property
    def longest(self) -> int:
        return int(np.diff(self.ends).max())

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            return self.dataset[key]
        row, position = key
        example = self.dataset[row]
        if self.rules.reader is not None:
            return Prompt(example, self.rules.reader.of_row(example, row, self.rules), position)
        ids = self.token_ids[self.ends[row] : self.ends[row + 1]]
        return Prompt(example, ModelInput(tuple(ids.tolist())), position)

    def first(self, count: int) -> list[Prompt]:
        return [self[row, row] for row in range(min(count, len(self)))]

    def prompts(self, first: int = 0, step: int = 1) -> list[Prompt]:
        """Return the prompts of an evaluation: every ``step``-th row from ``first``. Row indices serve as positions."""
        return [self[row, row] for row in range(first, len(self), step)]


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Rules that turn dataset rows into tokenised prompts.

    Plain texts are tokenised without the chat template. The model continues a conversation that ends with an
    assistant's message. A row's ``chat_template_kwargs`` override the run's."""

    tokenizer: Any
    max_prompt_tokens: int
    overlong: str  # Treatment of too long prompts: `drop` or `error`.
    chat_template_kwargs: dict[str, Any]
    name: str
    columns: Sequence[str] = ()  # Columns to read in addition to `COLUMNS`.
    # A function (row, the row's name in errors) that returns further arguments of the chat template.
    arguments: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None
    # An extension's reader of rows with images. `prompt(example, row, rules)` makes a `ModelInput`, `of_row` does so
    # with a small cache, `lengths(rows, rules)` counts tokens.
    reader: Any = None
    tell: Callable[[str], None] = lambda line: None
    rows: int = 0  # Rows of the model's embedding, or 0 if unknown.

    def where(self, row: int) -> str:
        return f"{self.name}, row {row}"

    def read_columns(self, present: Sequence[str]) -> list[str]:
        return [name for name in (*COLUMNS, *self.columns) if name in present]

    def encode(self, rows: Sequence[Mapping[str, Any]], first: int) -> list[tuple[int, ...]]:
        """Return each row's prompt as token ids. With `overlong_prompts: drop`, too long prompts are included.

        ``first`` is the index of ``rows[0]`` in the dataset, for errors."""
        # Rows with equal arguments of the chat template share one call of the tokenizer. Values of `alike`:
        # (arguments, row indices). Arguments are None for plain texts.
        alike: dict[str, tuple[dict[str, Any] | None, list[int]]] = {}
        for index, row in enumerate(rows):
            where = self.where(first + index)
            check_prompt(row.get("prompt"), where)
            arguments = self.template_arguments(row, where)
            alike.setdefault(repr(sorted((arguments or {}).items())), (arguments, []))[1].append(index)
        encoded: dict[int, tuple[int, ...]] = {}
        for arguments, places in alike.values():
            prompts = [rows[index]["prompt"] for index in places]
            if arguments is None:
                ids = text_ids(self.tokenizer, prompts)
            else:
                where, apply = self.where(first + places[0]), self.tokenizer.apply_chat_template
                if not getattr(self.tokenizer, "chat_template", "its own") and "chat_template" not in arguments:
                    raise ValueError(
                        f"{where}: the prompt is a conversation, but {self.tokenizer.name_or_path} has no chat "
                        "template. Use an instruction-tuned model or plain prompts, or set chat_template_path."
                    )
                write = functools.partial(apply, tokenize=False, **arguments)
                cleaned = [template_messages(messages, write) for messages in prompts]
                try:
                    ids = apply(cleaned, tokenize=True, return_dict=False, **arguments)
                except (jinja2.TemplateError, ValueError, TypeError) as error:
                    if len(places) == 1:
                        refusal = f"the chat template refuses the prompt {cleaned[0]!r}: {error}"
                        raise ValueError(f"{where}: {refusal}") from error
                    ids = [[*self.encode([rows[at]], first + at)[0]] for at in places]
            for index, own in zip(places, ids, strict=True):
                encoded[index] = tuple(own)
                if self.rows:
                    check_rows(own, self.rows, self.tokenizer, f"{self.where(first + index)}: the prompt")
                self.fits(len(own), rows[index]["prompt"], first + index)
        return [encoded[index] for index in range(len(rows))]

    def template_arguments(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        further = {} if self.arguments is None else self.arguments(row, where)
        if isinstance(row["prompt"], str):
            return None
        continues = row["prompt"][-1]["role"] == "assistant"
        arguments = {"add_generation_prompt": not continues, "continue_final_message": continues}
        own = without_nones(row.get("chat_template_kwargs") or {})
        return {**arguments, **self.chat_template_kwargs, **own, **further}

    def changed(self, example: Mapping[str, Any], where: str) -> ModelInput | None:
        """Tokenise a prompt that was changed after loading. A too long prompt raises a ValueError if the model is
        text-only and `overlong_prompts` is `error`. Otherwise return None for a too long prompt."""
        row = {name: example[name] for name in self.read_columns([*example])}
        if self.reader is not None:
            prompt = self.reader.prompt(row, 0, dataclasses.replace(self, name=where))
        else:
            (ids,) = self.encode([row], 0)
            prompt = ModelInput(ids)
        return prompt if len(prompt) <= self.max_prompt_tokens else None

    def fits(self, tokens: int, prompt: Any, row: int) -> bool:
        if not tokens:
            raise ValueError(f"{self.where(row)}: the prompt {prompt!r} has no tokens: remove the row.")
        if tokens > self.max_prompt_tokens and self.overlong == "error":
            raise ValueError(
                f"{self.where(row)}: the prompt has {tokens} tokens, over the limit of {self.max_prompt_tokens}. "
                "Shorten it, raise max_prompt_tokens or vllm_max_model_length, lower max_completion_length, or set "
                "`overlong_prompts: drop`."
            )
        return tokens <= self.max_prompt_tokens


def tokenize_prompts(dataset: Any, rules: PromptRules) -> PromptDataset:
    name, dataset = rules.name, whole(dataset, rules.name)
    check_columns(dataset, name, rules.reader is not None)
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows, so there are no prompts to sample from: add rows.")
    check_prompt_column(dataset.column_names, name)
    dataset = dataset.with_format(None)
    if rules.reader is None:
        read, encoded = dataset.select_columns(rules.read_columns(dataset.column_names)), list[np.ndarray]()
        for first in range(0, len(read), ROWS_AT_ONCE):
            watchdog.progress("the prompts' tokens")
            rows = by_row(read[first : first + ROWS_AT_ONCE])
            encoded += [np.asarray(ids, dtype=np.int32) for ids in rules.encode(rows, first)]
        lengths = [*map(len, encoded)]
    else:
        lengths = rules.reader.lengths(dataset, rules)
    kept = [row for row, tokens in enumerate(lengths) if rules.fits(tokens, "", row)]
    if not kept:
        remedy = "raise max_prompt_tokens or vllm_max_model_length, or lower max_completion_length"
        limit = f"the limit of {rules.max_prompt_tokens} tokens"
        raise ValueError(f"{name}: all {len(dataset)} prompts are over {limit}: {remedy}.")
    token_ids = np.concatenate([encoded[row] for row in kept]) if rules.reader is None else None
    dropped = {row: tokens for row, tokens in enumerate(lengths) if tokens > rules.max_prompt_tokens}
    ends = np.cumsum([0, *(lengths[row] for row in kept)], dtype=np.int64)
    return PromptDataset(dataset.select(kept) if dropped else dataset, token_ids, ends, dropped, rules)


def text_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokenise plain texts. A text that begins with the BOS token gets no second BOS token."""
    start, token = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    return [
        list(ids[1:] if start and text.startswith(start) and list(ids[:2]) == [token, token] else ids)
        for text, ids in zip(texts, tokenizer(texts).input_ids, strict=True)
    ]

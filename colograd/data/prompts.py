"""Prompts as tokens: the chat template, and the limit of their length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, overload

import jinja2
import numpy as np
import torch
from datasets import Dataset, IterableDataset

from ..batch import ModelInput, Prompt
from ..parallel import watchdog
from .columns import IMAGES, by_column, check_columns, check_dataset, check_prompt_column
from .messages import content_problem, template_messages, without_nones
from .vocabulary import check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 1000  # rows that are tokenised together
NAMED = 5  # largest number of too long prompts that a message lists
COLUMNS = ("prompt", "chat_template_kwargs", "environment")  # columns that a prompt's tokens may depend on


class PromptReader(Protocol):
    """Reads the rows of one dataset with media. An extension makes the reader of a policy."""

    most: int  # largest number of a prompt's media so far

    def prompt(self, example: dict[str, Any], row: int, rules: PromptRules) -> ModelInput:
        """Convert a row into its prompt. Raises ValueError if it can't be read."""

    def of_row(self, example: dict[str, Any], row: int, rules: PromptRules) -> ModelInput:
        """Return `prompt`, made once for steps that take the row soon after each other."""

    def lengths(self, rows: Dataset, rules: PromptRules) -> list[int]:
        """Return the number of tokens of each row's prompt."""


class PromptDataset(torch.utils.data.Dataset):
    """Prompts with their tokens; made by `tokenize_prompts`.

    ``dataset`` holds the kept rows. ``dropped`` maps each too long prompt's row number in the original dataset
    to its number of tokens. An index (row, position) gives a `Prompt`; any other index gives rows of ``dataset``.
    """

    def __init__(
        self,
        dataset: Dataset,
        token_ids: np.ndarray | None,
        ends: np.ndarray,
        dropped: dict[int, int],
        rules: PromptRules,
    ) -> None:
        """token_ids: [sum P] int32, one prompt after the other; ends: [rows + 1] int64, starting with 0. With a reader
        there are no token_ids; it reads a row when the row's prompt is requested."""
        assert len(ends) == len(dataset) + 1, (len(ends), len(dataset))
        self.dataset, self.dropped = dataset, dropped
        self._token_ids, self._ends, self._rules = token_ids, ends, rules
        # Chooses the prompts of each step in place of `StepOrder`, in an extension: `order(config)`, and with the state
        # that a checkpoint holds `saved`, `load(state)` and `missing`, why a checkpoint may have none.
        self.choice: Any = None

    def dropped_line(self) -> str:
        """Return a line for the user with the number and the rows of too long prompts."""
        rules, total = self._rules, len(self.dropped) + len(self)
        which = [f"row {row} ({tokens} tokens)" for row, tokens in self.dropped.items()]
        first = ", ".join(which[:NAMED] + ["..."] * (len(which) > NAMED))
        return (
            f"data: {len(which)} of {total} prompts are too long and were dropped: of {rules.name}, with a limit of "
            f"{rules.max_prompt_tokens} tokens, {first}"
        )

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return int(np.diff(self._ends).max())

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, key: tuple[int, int]) -> Prompt: ...

    @overload
    def __getitem__(self, key: int | slice) -> dict[str, Any]: ...

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            return self.dataset[key]
        row, position = key
        example = self.dataset[row]
        if self._rules.reader is not None:
            return Prompt(example, self._rules.reader.of_row(example, row, self._rules), position)
        ids = self._token_ids[self._ends[row] : self._ends[row + 1]]  # type: ignore[index]
        return Prompt(example, ModelInput(tuple(ids.tolist())), position)

    @property
    def most_images(self) -> int:
        """Largest number of images of a prompt."""
        return 0 if self._rules.reader is None else self._rules.reader.most

    def first(self, count: int) -> list[Prompt]:
        """Return the prompts of the first rows."""
        return [self[row, row] for row in range(min(count, len(self)))]

    def prompts(self, first: int = 0, step: int = 1) -> list[Prompt]:
        """Return every ``step``-th row from ``first`` on, at its own position (evaluation)."""
        return [self[row, row] for row in range(first, len(self), step)]


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Rules that turn rows into prompts.

    A conversation goes through the chat template, plain text through the tokenizer. A conversation that ends with an
    assistant's message is continued. A row's own ``chat_template_kwargs`` override the run's.
    """

    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    overlong: str  # for longer prompts: `drop` (see ``PromptDataset.dropped``) or `error`
    chat_template_kwargs: dict[str, Any]
    name: str  # the dataset's name in messages
    tools: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None  # a row's tools for the template
    reader: PromptReader | None = None  # reads all rows; None: they are text
    tell: Callable[[str], None] = lambda line: None  # receives progress lines
    rows: int = 0  # number of rows of the model's embedding; 0: unknown

    def where(self, row: int) -> str:
        return f"{self.name}, row {row}"

    def encode(self, columns: dict[str, list[Any]], first: int) -> list[tuple[int, ...]]:
        """Tokenise rows, including rows that will be dropped. ``first`` is the number of the first row."""
        prompts = columns["prompt"]
        # Rows with equal arguments go through the template together. Texts have no arguments (None), and go through the
        # tokenizer together. Each value is (the arguments, the rows' places among the prompts).
        alike: dict[str, tuple[dict[str, Any] | None, list[int]]] = {}
        for index, prompt in enumerate(prompts):
            check_prompt(prompt, self.where(first + index), self.tools is not None)
            arguments = None if isinstance(prompt, str) else template_arguments(columns, index, self)
            alike.setdefault(repr(sorted((arguments or {}).items())), (arguments, []))[1].append(index)
        encoded: dict[int, tuple[int, ...]] = {}
        for arguments, places in alike.values():
            alike_prompts = [prompts[index] for index in places]
            if arguments is None:
                ids = text_ids(self.tokenizer, alike_prompts)
            else:
                ids = _apply_template(self, alike_prompts, arguments, [first + index for index in places])
            encoded |= {index: tuple(own) for index, own in zip(places, ids, strict=True)}
        for index, prompt in enumerate(prompts):
            if self.rows:
                check_rows(encoded[index], self.rows, self.tokenizer, f"{self.where(first + index)}: the prompt")
            self.fits(len(encoded[index]), prompt, first + index)
        return [encoded[index] for index in range(len(prompts))]

    def changed(self, example: dict[str, Any], where: str) -> ModelInput | None:
        """Convert a row that isn't in the dataset, with its images in their parts; None if the prompt is too long."""
        if self.reader is not None:
            prompt = self.reader.prompt(example, 0, dataclasses.replace(self, name=where))
        else:
            (ids,) = self.encode({name: [value] for name, value in example.items()}, 0)
            prompt = ModelInput(ids)
        return prompt if len(prompt) <= self.max_prompt_tokens else None

    def fits(self, tokens: int, prompt: Any, row: int) -> bool:
        """Return whether a row's prompt isn't too long."""
        if not tokens:
            raise ValueError(f"{self.where(row)}: the prompt {prompt!r} has no tokens; remove it.")
        if tokens > self.max_prompt_tokens and self.overlong == "error":
            raise ValueError(
                f"{self.where(row)}: the prompt has {tokens} tokens, over the limit of "
                f"{self.max_prompt_tokens}. Shorten it, raise max_prompt_tokens or vllm_max_model_length, or set "
                "overlong_prompts to drop."
            )
        return tokens <= self.max_prompt_tokens


def tokenize_prompts(dataset: Any, rules: PromptRules) -> PromptDataset:
    """Tokenise each row's ``prompt`` once. An iterable dataset, which evaluation takes too, is read to its end."""
    name = rules.name
    check_dataset(dataset, name)
    if isinstance(dataset, IterableDataset):
        rows = list(dataset.with_format(None))
        features = dataset.features if rows else None  # an empty dataset doesn't fit features
        dataset = Dataset.from_dict(by_column(rows), features=features, on_mixed_types="use_json")
    check_columns(dataset, name, rules.reader is not None)
    if len(dataset) == 0:
        raise ValueError(f"{name} has no rows, and so there is nothing to sample from: add some.")
    check_prompt_column(dataset.column_names, name)
    dataset = dataset.with_format(None)
    wanted = dataset.select_columns([c for c in (*COLUMNS, *IMAGES) if c in dataset.column_names])
    if rules.reader is None:
        every, chunks = list[int](), [np.empty(0, dtype=np.int32)]
        for first in range(0, len(wanted), ROWS_AT_ONCE):
            watchdog.progress("the prompts' tokens")
            for ids in rules.encode(wanted[first : first + ROWS_AT_ONCE], first):
                every.append(len(ids))
                if len(ids) <= rules.max_prompt_tokens:
                    chunks.append(np.asarray(ids, dtype=np.int32))
        token_ids = np.concatenate(chunks)
        kept = [row for row, tokens in enumerate(every) if tokens <= rules.max_prompt_tokens]
    else:
        every, token_ids = rules.reader.lengths(wanted, rules), None
        kept = [row for row, tokens in enumerate(every) if rules.fits(tokens, "", row)]
    if not kept:
        raise ValueError(
            f"{name}: all {len(dataset)} prompts are over the limit of {rules.max_prompt_tokens} tokens. Raise "
            "max_prompt_tokens or vllm_max_model_length."
        )
    rows = dataset.select(kept) if len(kept) < len(dataset) else dataset
    ends = np.cumsum([0, *(every[row] for row in kept)], dtype=np.int64)
    dropped = {row: tokens for row, tokens in enumerate(every) if tokens > rules.max_prompt_tokens}
    return PromptDataset(rows, token_ids, ends, dropped, rules)


def text_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokenise plain texts. A text that begins with the BOS token, as chat templates write it, gets only one."""
    start, token = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    return [
        list(ids[1:] if start and text.startswith(start) and list(ids[:2]) == [token, token] else ids)
        for text, ids in zip(texts, tokenizer(texts).input_ids, strict=True)
    ]


def template_arguments(batch: dict[str, list[Any]], index: int, rules: PromptRules) -> dict[str, Any]:
    """Return the keyword arguments of the chat template for one row."""
    continues = batch["prompt"][index][-1]["role"] == "assistant"
    arguments = {"add_generation_prompt": not continues, "continue_final_message": continues}
    arguments |= rules.chat_template_kwargs
    own = batch["chat_template_kwargs"][index] if "chat_template_kwargs" in batch else None
    arguments |= without_nones(own or {})
    if rules.tools is not None:
        row = {"environment": batch["environment"][index]} if "environment" in batch else {}
        arguments["tools"] = rules.tools(row) or None
    return arguments


def _apply_template(
    rules: PromptRules, conversations: list[Any], arguments: dict[str, Any], rows: list[int]
) -> list[list[int]]:
    tokenizer = rules.tokenizer
    if not getattr(tokenizer, "chat_template", "its own") and "chat_template" not in arguments:
        raise ValueError(
            f"{rules.name}, row {rows[0]}: the prompt is a conversation, and {tokenizer.name_or_path} has no chat "
            "template. Use an instruction-tuned model, set tokenizer.chat_template, or give plain text."
        )
    cleaned = [
        template_messages(messages, lambda each: tokenizer.apply_chat_template(each, tokenize=False, **arguments))
        for messages in conversations
    ]
    try:
        return tokenizer.apply_chat_template(cleaned, tokenize=True, return_dict=False, **arguments)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        if len(rows) > 1:  # one by one, to find the row
            return [_apply_template(rules, [c], arguments, [r])[0] for c, r in zip(cleaned, rows, strict=True)]
        raise ValueError(
            f"{rules.name}, row {rows[0]}: the chat template refuses the prompt {cleaned[0]!r}: {error}"
        ) from error


def check_prompt(prompt: Any, where: str, tools: bool, images: bool = False) -> None:
    if isinstance(prompt, str):
        if tools:
            raise ValueError(
                f"{where}: the prompt is plain text, but tools need a conversation: give a list of messages, such as "
                '[{"role": "user", "content": "..."}].'
            )
        return
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and ("content" in m or (not images and len(m) > 1))
        for m in messages
    ):
        raise ValueError(
            f"{where}: the prompt is {prompt!r}; it must be a text, or a list of messages such as "
            '[{"role": "user", "content": "..."}].'
        )
    for index, message in enumerate(messages):
        if problem := content_problem(message, images):
            raise ValueError(f"{where}: message {index} of the prompt (role {message['role']}) has {problem}.")

"""`PromptStream`: prompts of a streamed dataset, tokenised while the rows are read."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader

from ...batch import ModelInput, Prompt
from ...config import GRPOConfig
from ...config.conflicts import check_conflicts
from ...data.columns import check_columns, check_no_images, check_prompt_column
from ...data.order import seed_of
from ...data.prompts import PromptRules

ROWS_AT_ONCE = 64


class PromptStream(torch.utils.data.IterableDataset):
    """The prompts of a `datasets.IterableDataset`. An item is the list of this rank's prompts of one optimizer step.

    Every rank reads all rows. The last rows of a pass over the dataset are skipped if they don't fill a generation. A
    resumed run reads the rows before the checkpoint once more, and compares them with the checkpoint's digest.
    """

    missing = "wasn't streamed"  # Part of the error text for a checkpoint without a state of this stream.

    def __init__(self, dataset: IterableDataset, rules: PromptRules, config: GRPOConfig) -> None:
        check_columns(dataset, rules.name)
        if rules.reader is not None:
            raise ValueError(
                f"{rules.name} is streamed, but a model that reads images needs a whole dataset: load the dataset "
                "without streaming."
            )
        self.dataset, self.rules = dataset.with_format(None), rules
        self.longest = rules.max_prompt_tokens  # Upper bound of prompts' tokens, as later prompts are unknown.
        self.num_dropped = 0
        if config.max_steps <= 0:
            raise ValueError(f"max_steps is {config.max_steps}, but a streamed dataset has no length: set max_steps.")
        check_conflicts(config, {"the dataset": "a stream"}, about="the dataset")
        self.per_step, self.round_steps = int(config.prompts_per_step or 1), int(config.steps_per_generation or 1)
        self.iterations, self.layout = config.num_iterations, config.layout
        if config.shuffle_dataset:
            self.dataset = self.dataset.shuffle(seed=seed_of(config))
        self.saved: dict[str, Any] = {}  # "items": number of yielded items; "digest": digest of their prompts.
        self._expected: dict[str, Any] = {}
        self.choice = self  # Checkpoints save this object's state; see `PromptDataset.choice`.
        self.first(1)

    def loader(self) -> DataLoader[list[Prompt]]:
        # Without `generator` an iteration would draw a number from torch's global generator.
        return DataLoader(self, batch_size=None, num_workers=0, generator=torch.Generator())

    def first(self, count: int) -> list[Prompt]:
        if not (rows := list(itertools.islice(self._pass(0, counts=False), count))):
            raise ValueError(
                f"{self.rules.name} has no rows, or all prompts exceed the limit of {self.longest} tokens: add shorter "
                "prompts, raise max_prompt_tokens or vllm_max_model_length, or lower max_completion_length."
            )
        return [Prompt(row, ModelInput(ids), n) for n, (row, ids) in enumerate(rows)]

    def load(self, state: dict[str, Any]) -> None:
        self._expected = state

    def __iter__(self) -> Iterator[list[Prompt]]:
        size, per_rank = self.per_step * self.round_steps, self.per_step // self.layout.data_size
        digest, items, position = hashlib.blake2b(digest_size=16), 0, 0
        self.num_dropped = 0
        for epoch in itertools.count():
            rows, rounds = self._pass(epoch), 0
            while len(block := list(itertools.islice(rows, size))) == size:
                prompts = [Prompt(row, ModelInput(ids), position + n) for n, (row, ids) in enumerate(block)]
                digest.update(repr([ids for _, ids in block]).encode())
                position, rounds = position + size, rounds + 1
                for step in [*range(self.round_steps)] * self.iterations:
                    items += 1
                    self.saved = {"items": items, "digest": digest.hexdigest()}
                    if self._expected.get("items") == items and self._expected != self.saved:
                        raise ValueError(
                            f"{self.rules.name} isn't the stream that the checkpoint was trained on: the prompts of "
                            f"the first {items} steps differ. Make the stream's order repeatable, or set "
                            "`ignore_data_skip: true` to begin the stream anew."
                        )
                    first = step * self.per_step + self.layout.data_rank * per_rank
                    yield prompts[first : first + per_rank]
            if not rounds:
                raise ValueError(
                    f"{self.rules.name} ended after {len(block)} prompts, but one generation takes {size}: lower "
                    "prompts_per_step or steps_per_generation, or add prompts."
                )

    def _pass(self, epoch: int, counts: bool = True) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        self.dataset.set_epoch(epoch)
        rows, number = iter(self.dataset), 0
        while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
            columns = {name for row in block for name in row}
            check_prompt_column(columns, self.rules.name)
            check_no_images(columns, self.rules.name)
            for row, ids in enumerate(self.rules.encode(block, number), start=number):
                if len(ids) <= self.rules.max_prompt_tokens:
                    yield block[row - number], ids
                    continue
                self.num_dropped += counts
                if counts and str(self.num_dropped).rstrip("0") == "1":  # the 1st, 10th, 100th ... dropped prompt
                    self.rules.tell(
                        f"data: {self.num_dropped} prompt(s) of {self.rules.name} were too long so far and were "
                        f"dropped, with a limit of {self.rules.max_prompt_tokens} tokens: the latest is row {row} of "
                        f"pass {epoch + 1} ({len(ids)} tokens)"
                    )
            number += len(block)


def prompts_of(dataset: Any, rules: PromptRules, config: GRPOConfig) -> PromptStream | None:
    return PromptStream(dataset, rules, config) if isinstance(dataset, IterableDataset) else None

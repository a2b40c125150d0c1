"""The order of prompts in training: this rank's prompts of each optimizer step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch.utils.data import DataLoader, Sampler

from ..batch import Prompt
from ..config import GRPOConfig
from .prompts import PromptDataset

EXTRA = 2**40  # Positions from here on belong to extra prompts (dynamic sampling, carry-over).


@dataclass(eq=False)
class StepOrder(Sampler[list[tuple[int, int]]]):
    """Batch sampler: one item is this rank's prompts of one optimizer step, as [(row, position), ...].

    A position is a prompt's index in the whole training. A round has ``steps_per_generation`` different steps, repeated
    ``num_iterations`` times. Two rounds of prompts a to h, with 2 prompts per step, 2 steps and 2 iterations:
    ab cd ab cd | ef gh ef gh."""

    num_rows: int
    prompts_per_step: int  # Prompts of a step over all ranks.
    data_rank: int
    data_size: int
    steps_per_generation: int = 1
    num_iterations: int = 1
    shuffle: bool = True
    seed: int = 0
    epoch: int = field(default=0, init=False)

    @classmethod
    def of(cls, config: GRPOConfig, num_prompts: int) -> Self:
        steps, shuffle = config.steps_per_generation or 1, bool(config.shuffle_dataset)
        ranks = config.layout.data_rank, config.layout.data_size
        prompts = num_prompts, config.prompts_per_step or 1
        return cls(*prompts, *ranks, steps, config.num_iterations, shuffle, seed_of(config))

    def __post_init__(self) -> None:
        assert self.prompts_per_step % self.data_size == 0, (self.prompts_per_step, self.data_size)
        assert 0 <= self.data_rank < self.data_size, (self.data_rank, self.data_size)
        self.round_size = self.prompts_per_step * self.steps_per_generation  # Prompts of a round over all ranks.
        self.num_rounds = self.num_rows // self.round_size
        if self.num_rounds == 0:
            raise ValueError(
                f"The dataset has {self.num_rows} prompts, but one generation takes {self.round_size} "
                f"(prompts_per_step={self.prompts_per_step} times steps_per_generation={self.steps_per_generation}): "
                "lower one of the two (`per_device_train_batch_size` also sets prompts_per_step), or add prompts."
            )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return self.num_rounds * self.steps_per_generation * self.num_iterations

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        per_rank = self.prompts_per_step // self.data_size
        for number in range(self.epoch * self.num_rounds, (self.epoch + 1) * self.num_rounds):
            rows, start = self.rows_of(number), number * self.round_size
            for step in [*range(self.steps_per_generation)] * self.num_iterations:
                first = step * self.prompts_per_step + self.data_rank * per_rank
                yield [(rows[place], start + place) for place in range(first, first + per_rank) if rows]

    def rows_of(self, number: int) -> Sequence[int]:
        """Return a round's dataset rows in training order. ``number``: the round's index, counted over all epochs."""
        epoch, index = divmod(number, self.num_rounds)
        rows = _permutation(self.num_rows, self.seed, epoch) if self.shuffle else range(self.num_rows)
        return rows[index * self.round_size : (index + 1) * self.round_size]


@functools.lru_cache(maxsize=1)
def _permutation(rows: int, seed: int, epoch: int) -> list[int]:
    # As in TRL, one generator draws the permutations of all epochs in turn. Permutations of past epochs are drawn
    # again, so checkpoints need no generator state. One takes 15 ms for a million rows.
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epoch):
        torch.randperm(rows, generator=generator)
    return torch.randperm(rows, generator=generator).tolist()


def seed_of(config: GRPOConfig) -> int:
    return int(config.seed if config.data_seed is None else config.data_seed)


def extra_prompts(dataset: PromptDataset, config: GRPOConfig, step: int, drawn: int, count: int) -> list[Prompt]:
    """Return ``count`` extra prompts of optimizer step ``step`` for this rank, e.g. for dynamic sampling.
    ``drawn`` is the number of extra prompts that earlier calls returned for this rank and step."""
    layout = config.layout
    places = (index * layout.data_size + layout.data_rank for index in range(drawn, drawn + count))
    return [prompt_at(dataset, config, EXTRA * (step + 1) + place) for place in places]


def prompt_at(dataset: PromptDataset, config: GRPOConfig, position: int) -> Prompt:
    """Return the prompt at a position of a run without curriculum."""
    if position < EXTRA:
        order = StepOrder.of(config, len(dataset))
        number, place = divmod(position, order.round_size)
        return dataset[order.rows_of(number)[place], position]
    step, place = divmod(position, EXTRA)
    rows = permutation(len(dataset), f"{seed_of(config)} extra {step - 1}")
    return dataset[int(rows[place % len(rows)]), position]


@functools.lru_cache(maxsize=1)
def permutation(rows: int, text: str) -> torch.Tensor:
    """Return a random permutation of 0 ... rows-1 (int64) that depends only on ``text``."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.randperm(rows, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1))


class PromptLoader(DataLoader):
    """The training dataloader. `accelerate.skip_first_batches`, which resumes an epoch, needs a batch sampler."""

    def __init__(self, dataset: PromptDataset, order: StepOrder) -> None:
        # DataLoader draws a seed at each epoch's start. An own generator leaves torch's global one untouched.
        super().__init__(dataset, batch_sampler=order, collate_fn=list, num_workers=0, generator=torch.Generator())

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)

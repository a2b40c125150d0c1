"""The curriculum: chooses prompts by pass rates of earlier rounds and by columns. All ranks record the same rates."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from ...batch import SampledStep
from ...config import GRPOConfig
from ...data import PromptDataset
from ...data.columns import listed
from ...data.order import StepOrder, permutation
from ...parallel.ranks import gather, on_all_ranks
from ...rollout.rounds import Tally
from .settings import LEVELS, Curriculum, read_curriculum

HARD, EASY = 0.25, 0.75


def add_curriculum(prompts: Any, config: GRPOConfig) -> None:
    if (curriculum := read_curriculum(config)) is not None and isinstance(prompts, PromptDataset):
        prompts.choice = CurriculumOrder.by(curriculum, prompts.dataset, config)


class CurriculumOrder(StepOrder):
    """A `StepOrder` with a curriculum: it chooses a round's rows just before the round's first step."""

    missing = "had no curriculum"  # Part of an error: why a checkpoint has no record of a curriculum.
    settings: Curriculum
    round_steps: int
    pools: np.ndarray | None  # Each row's pool as an index into ``shares``, int [rows]. None: pools by pass rate.
    difficulties: np.ndarray | None

    @classmethod
    def by(cls, curriculum: Curriculum, dataset: Any, config: GRPOConfig) -> Self:
        made = cls.of(config, len(dataset))
        made.settings, made.round_steps = curriculum, config.round_length
        made.pools = None if curriculum.column is None else _pools(curriculum, dataset)
        made.difficulties = None if curriculum.difficulty is None else _numbers(dataset, curriculum.difficulty)
        made.load({})
        return made

    def order(self, config: GRPOConfig) -> StepOrder:
        self.data_rank, self.data_size = config.layout.data_rank, config.layout.data_size
        return self

    def load(self, state: dict[str, Any]) -> None:
        self.rounds = int(state.get("rounds", 0))
        if state and state.get("rows") != self.num_rows:
            raise ValueError(
                f"The checkpoint's curriculum has {state.get('rows', 'an unknown number of')} prompts, but the dataset "
                f"has {self.num_rows}: use the same dataset, or set ignore_data_skip: true to drop the old pass rates."
            )
        self.drawn = np.zeros(self.num_rows, dtype=np.int32)
        self.last = np.full(self.num_rows, -1, dtype=np.int32)
        self.rate = np.full(self.num_rows, np.nan, dtype=np.float32)
        for name, array in (("drawn", self.drawn), ("last", self.last), ("rate", self.rate)) if state else ():
            array[:] = np.frombuffer(zlib.decompress(base64.b64decode(state[name])), dtype=array.dtype)
        self.begun = self.rounds  # Index of the first round that this run samples.
        self._present: list[int] = []

    @property
    def saved(self) -> dict[str, Any]:
        arrays = {"drawn": self.drawn, "last": self.last, "rate": self.rate}
        packed = {name: base64.b64encode(zlib.compress(a.tobytes(), 1)).decode() for name, a in arrays.items()}
        return {"rounds": self.rounds, "rows": self.num_rows, **packed}

    def record(self, passes: Iterable[tuple[int, float]]) -> None:
        """Record (position, pass rate) of the round's prompts. The pass rate is NaN if no completion was judged."""
        for position, rate in sorted(dict(passes).items()):
            row = self._present[position - self.rounds * self.round_size]
            self.drawn[row] += 1
            self.last[row] = self.rounds
            if rate == rate:
                self.rate[row] = rate
        self.rounds += 1

    def counts(self) -> dict[str, float]:
        return {
            "curriculum/resting": float(self._resting(self.rounds).sum()),
            "curriculum/never_drawn": float((self.drawn == 0).sum()),
        }

    def rows_of(self, number: int) -> list[int]:
        """Return a round's row indices, or [] for a round before the checkpoint that the run resumes from."""
        return [] if number < self.begun else self.choose(number)

    def choose(self, number: int) -> list[int]:
        self.rounds = number
        step, count = number * self.round_steps, self.round_size
        ties = np.arange(self.num_rows)
        if self.shuffle:
            ties = permutation(self.num_rows, f"{self.seed} curriculum {number}").numpy()
        turn = np.lexsort((ties, self.drawn))  # Rows with the fewest draws come first.
        until, shut = self.settings.difficulty_until, np.zeros(self.num_rows, dtype=bool)
        if self.difficulties is not None and until is not None:
            shut = self.difficulties > until.at(step)
        able = ~self._resting(number) & ~shut
        chosen: list[int] = []
        taken = np.zeros(self.num_rows, dtype=bool)

        def take(rows: np.ndarray, most: int) -> None:
            found = rows[~taken[rows]][: max(most, 0)]
            taken[found] = True
            chosen.extend(found.tolist())

        for pool, wanted in self._quotas(able, step, count, number):
            take(turn[able[turn] & pool[turn]], wanted)
        take(turn[able[turn]], count - len(chosen))
        by_rest = np.lexsort((ties, self.last))
        take(by_rest[~shut[by_rest]], count - len(chosen))
        if self.difficulties is not None:
            take(np.lexsort((ties, self.difficulties)), count - len(chosen))
        if self.shuffle:
            chosen.sort(key=lambda row: ties[row])
        self._present = chosen
        return chosen

    def _resting(self, number: int) -> np.ndarray:
        if self.settings.solved_at is None:
            return np.zeros(self.num_rows, dtype=bool)
        due = self.last + self.settings.revisit_after * self.num_rounds
        return (self.rate >= np.float32(self.settings.solved_at)) & (number < due)

    def _quotas(self, able: np.ndarray, step: int, count: int, number: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield each pool's rows (a mask), and how many to draw. Random rounding makes shares exact on average."""
        shares = self.settings.shares
        if shares is None:
            return
        names, labels = [*shares], self.pools
        if labels is None:
            labels = np.select([np.isnan(self.rate), self.rate <= HARD, self.rate < EASY], [0, 1, 2], 3)
            names = [*LEVELS]
        pools = [labels == names.index(name) for name in shares]
        given = zip(shares.values(), pools, strict=True)
        weights = [share.at(step) if (able & pool).any() else 0.0 for share, pool in given]
        total = sum(weights)
        if total <= 0:
            return
        digest = hashlib.sha256(f"{self.seed} shares {number}".encode()).digest()
        offset, before, end = int.from_bytes(digest[:4], "big") / 2**32, 0, 0.0
        for pool, weight in zip(pools, weights, strict=True):
            end += weight / total * count
            upto = min(count, int(end + offset))
            yield pool, upto - before
            before = upto


def pass_rates(trainer: Any) -> Tally | None:
    if trainer.args.curriculum is None:
        return None

    def record(steps: Sequence[SampledStep]) -> dict[str, float]:
        curriculum, own = trainer.train_prompts.choice, []
        threshold = curriculum.settings.pass_threshold
        with on_all_ranks("the pass rates"):
            for scored in (scored for step in steps for scored in step.sampled):
                totals = trainer.combine(scored.rewards.clone())
                judged = totals[~totals.isnan()]
                rate = float((judged >= threshold).float().mean()) if len(judged) else math.nan
                own.append((scored.group.position, rate))
        curriculum.record(passes for of_rank in gather(own) for passes in of_rank)
        return curriculum.counts() if trainer.args.layout.is_main else {}

    return record


def _pools(curriculum: Curriculum, dataset: Any) -> np.ndarray:
    values, names = [str(value) for value in _column(dataset, curriculum.column)], list(curriculum.shares or ())
    if other := sorted({*values} - {*names}):
        problem = f"the column {curriculum.column!r} has the value {other[0]!r}, but `shares` has only {listed(names)}"
        remedy = "give this value a share. With a share of 0, its prompts are drawn only if another pool has too few"
        raise ValueError(f"curriculum: {problem}: {remedy}.")
    if absent := [name for name in names if name not in set(values)]:
        present = f"the column {curriculum.column!r} has only {listed(sorted({*values}))}"
        raise ValueError(f"curriculum: `shares` has the pool {absent[0]!r}, but {present}: remove the share.")
    return np.array([names.index(value) for value in values])


def _numbers(dataset: Any, column: str) -> np.ndarray:
    values = _column(dataset, column)
    with contextlib.suppress(TypeError, ValueError):
        if not np.isnan(found := np.array([float(value) for value in values])).any():
            return found
    raise ValueError(f"curriculum: a row of the column {column!r} has no number: store a number in each row.")


def _column(dataset: Any, column: str | None) -> list[Any]:
    if column in dataset.column_names:
        return list(dataset[column])
    present = listed(dataset.column_names)
    raise ValueError(f"curriculum: the dataset has no column {column!r}; it has {present}: name one of these.")

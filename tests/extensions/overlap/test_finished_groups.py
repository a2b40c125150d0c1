"""Which rank takes which finished group, without a process group: ranks share a store in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.extensions.overlap import finished_groups
from colograd.extensions.overlap.finished_groups import FinishedGroups, tokens_of
from colograd.extensions.overlap.rounds import FILE, read_partition
from colograd.parallel.layout import RankLayout
from colograd.rollout.record_file import add_step

Make = Callable[..., list[FinishedGroups]]


def group(position: int, *lengths: int) -> ScoredGroup:
    rollouts = tuple(
        Rollout((1, 2), [5] * n, torch.zeros(n), torch.ones(n).bool(), FinishReason.STOP, 0) for n in lengths
    )
    return ScoredGroup(Group({"row": position}, rollouts, position), torch.zeros(len(lengths), 1), torch.ones(1))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Make:
    store = dist.HashStore()
    monkeypatch.setattr(finished_groups, "_store", lambda: store)
    monkeypatch.setattr(finished_groups, "EVERY", 0.0)
    numbers = itertools.count(1)

    def make(size: int, ranks_per_engine: int = 1, between_engines: bool = True) -> list[FinishedGroups]:
        number, made = next(numbers), []
        for rank in range(size):
            monkeypatch.setattr(finished_groups, "_numbers", iter([number]))  # each rank is a process elsewhere
            layout = RankLayout(rank, size, ranks_per_engine, size)
            made.append(FinishedGroups(layout, between_engines, lambda one: len(one.advantages) > 0))
        for rank, one in enumerate(made):
            one.begin(range(rank * 10, rank * 10 + 10))
        return made

    return make


def positions(taken: list[ScoredGroup]) -> list[int]:
    return [scored.group.position for scored in taken]


def test_rank_takes_own_groups_before_offered_ones(ranks: Make) -> None:
    """Ranks offer groups between two steps of their engine, once another rank wants some."""
    first, second = ranks(2)
    for one in (group(0, 4), group(1, 6, 6), group(99, 4)):  # the last is of a later step
        first.add(one)
    second.add(group(10, 3))
    first.finish()
    assert positions(first.take(20)) == [1, 0] and not first.all_sampled()
    second.serve()
    assert first.take(20) == [], "nothing was offered before a rank wanted it"
    second.add(group(11, 9))
    second.serve()
    assert positions(first.take(8)) == [11], "the largest, alone as it is over the budget"
    second.finish()
    assert first.all_sampled() and second.all_sampled()
    assert positions(second.take(20)) == [10] and second.take(20) == first.take(20) == []


def test_when_all_have_sampled_ranks_share_what_is_left_until_none_trains(ranks: Make) -> None:
    first, second = ranks(2)
    for index in range(8):
        second.add(group(10 + index, 4))
    assert first.take(99) == []  # it wants groups
    first.finish()
    second.finish()
    assert first.is_over() and second.is_over(), "nobody is amid a micro-batch: what is left is balanced"
    with first.training():
        assert not second.is_over()
        sizes = []
        for one in itertools.cycle((second, first)):
            if not (taken := one.take(99)):
                break
            sizes.append(len(taken))
    assert sizes == [4, 2, 2], "half of what it knows to be left, though there is room for all"
    assert second.is_over()


def test_no_group_is_taken_twice(ranks: Make) -> None:
    made = ranks(4)
    for rank, one in enumerate(made):
        for index in range(10):
            one.add(group(rank * 10 + index, 1 + index))
        one.finish()
    found: list[int] = []

    def take_all(one: FinishedGroups) -> None:
        while taken := one.take(8):
            found.extend(positions(taken))

    threads = [threading.Thread(target=take_all, args=(one,)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(40))


def test_groups_move_between_engines_only_if_enabled(ranks: Make) -> None:
    """Ranks of one engine otherwise take groups from its first rank alone."""
    for between, wanted in ((False, []), (True, [0])):
        first, _, _, last = ranks(4, ranks_per_engine=2, between_engines=between)
        first.add(group(0, 4))
        assert last.take(9) == []
        first.serve()
        assert positions(last.take(9)) == wanted


def test_what_isn_t_trained_is_never_taken(ranks: Make) -> None:
    first, second = ranks(2)
    second.add(group(10, 4))
    untrained = group(11, 4)
    second.add(ScoredGroup(untrained.group, untrained.rewards, torch.ones(0)))
    assert first.take(9) == []
    second.serve()
    assert positions(first.take(9)) == [10] and first.take(9) == []


def test_rounds_begin_with_nothing_and_leave_no_notes_behind(ranks: Make) -> None:
    made = ranks(2)
    for number in range(3):
        made[1].add(group(10, 4))
        made[0].finish()
        assert not made[0].all_sampled() and made[0].take(9) == []
        made[1].serve()
        assert positions(made[0].take(9)) == [10]
        made[1].finish()
        assert made[0].all_sampled()
        for rank, one in enumerate(made):
            one.begin(range(rank * 10, rank * 10 + 10))
        assert finished_groups._store().num_keys() == 0, number


def test_a_group_too_large_for_the_store_stays(ranks: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_groups, "LARGEST", 10)
    first, second = ranks(2)
    second.add(group(10, 4))
    assert first.take(9) == []
    second.serve()
    assert first.take(9) == [] and positions(second.take(9)) == [10]


def test_tokens_are_a_row_s(ranks: Make) -> None:
    assert tokens_of(group(0, 3, 4)) == 2 + 3 + 4


# -- the record


def test_partition_reads_back_and_invalid_lines_give_none(tmp_path) -> None:
    partition = (((4, 2), (7,)), ())
    assert read_partition(tmp_path, 3) is None
    (tmp_path / FILE).write_text('{"step": 3, "ra\n[]\n{"step": 3, "ranks": [[[[1, ["x"]]]]]}\n')
    assert read_partition(tmp_path, 3) is None
    add_step(tmp_path / FILE, 3, {"ranks": partition})
    assert read_partition(tmp_path, 3) == partition and read_partition(tmp_path, 4) is None

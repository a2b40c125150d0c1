"""The layout of ranks: the example of its docstring, and that groups divide the world."""

from __future__ import annotations

import pytest

from colograd.parallel import layout as layouts
from colograd.parallel.layout import RankLayout, check_machines


def test_the_example_of_the_docstring() -> None:
    ranks = [RankLayout(rank, 8, ranks_per_engine=2, ranks_per_node=4) for rank in range(8)]
    assert [layout.data_rank for layout in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {layout.data_size for layout in ranks} == {4}
    assert [layout.engine_place for layout in ranks] == [0, 1] * 4
    assert [layout.engine_group for layout in ranks][2:4] == [(2, 3), (2, 3)]
    assert {layout.shard_group for layout in ranks} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert [layout.node for layout in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.is_main for layout in ranks] == [True] + [False] * 7


@pytest.mark.parametrize(("world", "engine"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_engines_and_shards_divide_the_ranks(world: int, engine: int) -> None:
    ranks = [RankLayout(rank, world, ranks_per_engine=engine) for rank in range(world)]
    for groups in ({layout.engine_group for layout in ranks}, {layout.shard_group for layout in ranks}):
        assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert all(layout.rank in layout.engine_group and layout.rank in layout.shard_group for layout in ranks)


def test_the_ranks_of_an_engine_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "gather", lambda own: ["one"] * 3 + ["two"] * 5)
    check_machines(RankLayout(7, 8))
    for rank in (0, 7):  # on all ranks, whosever engine it is
        with pytest.raises(ValueError, match=r"is 2, but the ranks 2 to 3, .* are on 2 machines \(one, two\): start"):
            check_machines(RankLayout(rank, 8, ranks_per_engine=2))
    monkeypatch.setattr(layouts, "gather", lambda own: ["one"] * 4 + ["two"] * 4)
    check_machines(RankLayout(5, 8, ranks_per_engine=4))

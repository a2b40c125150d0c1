"""The layout of ranks: the docstring's example, and groups that divide the world."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from colograd.engine.building import build_conditions, nondeterminism_allowed, rank_variables_of
from colograd.parallel.layout import Place, RankLayout, check_engines


def test_the_example_of_the_docstring() -> None:
    ranks = [RankLayout(rank, 8, ranks_per_engine=2, ranks_per_node=4) for rank in range(8)]
    assert [layout.data_rank for layout in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {layout.data_size for layout in ranks} == {4}
    assert [layout.engine_place for layout in ranks] == [0, 1] * 4
    assert [layout.engine_group for layout in ranks][2:4] == [(2, 3), (2, 3)]
    assert {layout.shard_group for layout in ranks} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert [layout.node for layout in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.leads_node for layout in ranks] == ([True] + [False] * 3) * 2 and ranks[0].nodes == 2
    assert [layout.is_main for layout in ranks] == [True] + [False] * 7


def test_the_ranks_of_a_row() -> None:
    ranks = [RankLayout(rank, 8, 2, 4, ranks_per_sequence=2, policy_parts=2) for rank in range(8)]
    assert {layout.row_group for layout in ranks} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert {layout.sequence_group for layout in ranks} == {(0, 2), (1, 3), (4, 6), (5, 7)}
    whole = [RankLayout(rank, 4, 2, 4, ranks_per_sequence=4) for rank in range(4)]
    assert {layout.sequence_group for layout in whole} == {layout.row_group for layout in whole} == {(0, 1, 2, 3)}
    alone = RankLayout(1, 4)
    assert alone.row_group == alone.sequence_group == (1,)


@pytest.mark.parametrize(("world", "engine"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_engines_and_shards_divide_the_ranks(world: int, engine: int) -> None:
    ranks = [RankLayout(rank, world, ranks_per_engine=engine) for rank in range(world)]
    for groups in ({layout.engine_group for layout in ranks}, {layout.shard_group for layout in ranks}):
        assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert all(layout.rank in layout.engine_group and layout.rank in layout.shard_group for layout in ranks)


def test_vllm_runs_without_deterministic_algorithms() -> None:
    """The setting comes back after an error too, and stays off if it was off."""
    for asked in (False, True):
        torch.use_deterministic_algorithms(asked, warn_only=asked)
        try:
            with contextlib.suppress(KeyError), nondeterminism_allowed():
                assert not torch.are_deterministic_algorithms_enabled()
                raise KeyError
            assert torch.are_deterministic_algorithms_enabled() == asked
            assert torch.is_deterministic_algorithms_warn_only_enabled() == asked
        finally:
            torch.use_deterministic_algorithms(False)


def test_float32_products_keep_their_precision_beside_vllm() -> None:
    """`tf32: true` sets the precision, and vLLM's worker changes it during its start."""
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "tf32"
    try:
        with build_conditions(torch.device("cpu"), sleeps=False, has_adapter=False):
            torch.set_float32_matmul_precision("highest")
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = before
        for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            products.fp32_precision = before
    torch.set_float32_matmul_precision("high")  # by the older setting, which torch's compiler reads
    try:
        with build_conditions(torch.device("cpu"), sleeps=False, has_adapter=False):
            torch.set_float32_matmul_precision("highest")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_vllm_gets_the_index_of_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to the launcher's variables are undone."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with rank_variables_of(torch.device("cuda", 0)):
        assert os.environ["LOCAL_RANK"] == "0"
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("3", "8")
    with rank_variables_of(torch.device("cpu")):
        assert os.environ["LOCAL_RANK"] == "3"


def test_ranks_of_an_engine_share_a_machine() -> None:
    def places(*hosts: str) -> list[Place]:
        return [Place(host, 0, 4) for host in hosts]

    check_engines(RankLayout(7, 8), places(*["one"] * 3, *["two"] * 5))
    for rank in (0, 7):  # on all ranks, whosever engine it is
        with pytest.raises(ValueError, match=r"is 2, but the ranks 2 to 3 .* different machines \(one, two\)\. Start"):
            check_engines(RankLayout(rank, 8, 2, ranks_per_node=8), places(*["one"] * 3, *["two"] * 5))
        with pytest.raises(ValueError, match=r"is 2, but the ranks 2 to 3 .* different machines \(localhost\)\. Start"):
            check_engines(RankLayout(rank % 6, 6, 2, ranks_per_node=3), places(*["localhost"] * 6))
    check_engines(RankLayout(5, 8, 4, ranks_per_node=4), places(*["one"] * 4, *["two"] * 4))

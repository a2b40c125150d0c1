"""Slices of a sharded parameter, and their places in an engine's whole or split tensor."""

from __future__ import annotations

import pytest
import torch

from colograd.extensions.fsdp.rows import Cut, Rows, place_of
from colograd.weights.mapping import Slice


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 7))
def test_ranks_have_every_row_once(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr("colograd.extensions.fsdp.rows.world_size", lambda: ranks)
    cut = Cut("p", torch.empty(0), torch.Size((5, 3)))
    assert [row for rank in range(ranks) for row in cut.rows_of(rank)] == [*range(5)]
    assert all(len(cut.rows_of(rank)) <= cut.share for rank in range(ranks)) and cut.row == 3


CUTS = {
    "all of it": (),
    "rows": (slice(2, 5),),
    "columns": (slice(None), slice(2, 4)),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
@pytest.mark.parametrize("step", (1, 2, 4, 6))
def test_rows_in_small_pieces_fill_their_place(cut: tuple[slice, ...], step: int) -> None:
    whole = torch.arange(24.0).view(6, 4)
    destination = torch.full_like(whole[cut], -1)
    place = Slice("p", whole, destination, cut)
    for first in range(0, 6, step):
        if (found := place_of(place, Rows("p", first, whole[first : first + step], 6))) is not None:
            destination[found[0]] = found[1]
    assert torch.equal(destination, whole[cut])


def test_rows_of_another_engine_rank_are_not_written() -> None:
    place = Slice("p", torch.zeros(6, 4), torch.zeros(2, 4), (slice(0, 2),))
    assert place_of(place, Rows("p", 2, torch.ones(4, 4), 6)) is None

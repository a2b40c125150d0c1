"""A run that is killed at any moment loses nothing: the short form of tests/soak/kill.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "soak"))

import kill

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_any_moment_nothing_is_lost_or_paid_for_twice(ranks: int) -> None:
    assert kill.soak(3, seed=ranks, ranks=ranks)["kills"] == 3

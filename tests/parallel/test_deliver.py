"""Exchanges between ranks, through host memory. No engine."""

from __future__ import annotations

import json

import launcher
from paths import SCRIPTS


def test_ranks_receive_only_their_own_messages() -> None:
    with launcher.apart(SCRIPTS / "delivering_ranks.py", ranks=3, env={"OMP_NUM_THREADS": "1"}) as started:
        done = [rank.wait() for rank in started]
    assert [rank.returncode for rank in done] == [0, 0, 0], [rank.stderr[-2000:] for rank in done]
    first, second, third = (json.loads(rank.stdout.splitlines()[-1]) for rank in done)
    assert first[:2] == [[2], [1]] and first[2] < 100
    assert second == [[], [], 0]
    assert third[:2] == [[0], [100_000]] and 100_000 < third[2] < 100_200

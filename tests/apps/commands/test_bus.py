"""The bus's speed is measured. On a CPU a memory copy stands for the bus."""

from __future__ import annotations

import torch

from colograd.apps.doctor import bus_speed


def test_a_copy_each_way_has_a_speed() -> None:
    assert bus_speed(torch.device("cpu"), size=2**20) > 0

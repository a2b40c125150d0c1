"""The speed of the bus between host and GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..runtime.page_locked import host_empty

SIZE = 2**27  # bytes per copy
COPIES = 4  # copies each way


def bus_speed(device: torch.device, size: int = SIZE) -> float:
    """Measure GB/s each way between page-locked memory and the device, both ways at once, after some first copies."""
    module: Any = torch.get_device_module(device)
    host = [host_empty(torch.Size([size]), torch.uint8, device) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    coming, leaving = module.Stream(), module.Stream()

    def copy(times: int) -> float:
        module.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            with module.stream(coming):
                there[0].copy_(host[0], non_blocking=True)
            with module.stream(leaving):
                host[1].copy_(there[1], non_blocking=True)
        module.synchronize()
        return time.perf_counter() - began

    copy(1)
    return COPIES * size / copy(COPIES) / 1e9

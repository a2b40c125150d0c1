"""Asynchronous copies of small tensors from host memory to the device."""

from __future__ import annotations

import torch


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to ``device`` without waiting. Kernels launched later on the current stream can use it. The
    tensor is pinned first, because a copy from unpinned memory waits until the device has finished earlier work."""
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

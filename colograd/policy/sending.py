"""Asynchronous copies of small tensors from the host to the device."""

from __future__ import annotations

import torch


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device without waiting. Later kernels on the same stream can use it.

    The copy is from pinned memory: from ordinary memory the host would wait until the device has finished earlier work.
    """
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

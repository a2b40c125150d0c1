"""Small tensors on their way from the host to the device, for which nobody waits."""

from __future__ import annotations

import torch


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device. What is computed with it there comes later on the same stream.

    From ordinary memory the host would wait until the device has done all that it was given before.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

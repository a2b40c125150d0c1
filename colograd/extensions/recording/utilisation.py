"""Model FLOPs of a training step, and the device's peak FLOP/s.

FLOPs = 6 x elements of the layers' matrices (4 x if frozen) x tokens of packed rows
      + 6 x elements of the head's matrix (4 x if frozen) x predicted tokens
      + 12 x layers x heads x head size x pairs of a query and a key that the query attends to

Recomputed activations, norms and the optimizer aren't counted. Sliding-window attention counts as full attention.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...memory.shape import Shape
from ...parallel.shards import parts_of
from ...policy.lora import unwrap
from ...runtime import cpu_products
from ...runtime.sizes import num_experts

# Words of a device's name -> FLOP/s of its dense bfloat16 matrix products, from data sheets.
PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12,
}  # fmt: skip
SECONDS = 0.2  # Time to measure the peak of a device that has no entry in `PEAKS`.
SIZES = {"cpu": 1024, "cuda": 4096}  # Sides of the square matrices that the measurement multiplies.


def peak_of(device: str) -> float | None:
    found = (peak for name, peak in PEAKS.items() if all(re.search(rf"\b{word}\b", device) for word in name.split()))
    return next(found, None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype == torch.bfloat16 else ""
    if name and (peak := peak_of(name)) is not None:
        return peak, f"{name}'s data sheet"
    if device.type == "cpu" and dtype == torch.bfloat16 and cpu_products.wanted():
        dtype = torch.float32  # Colograd's layers use float32 on a CPU without bfloat16 products.
    size = SIZES.get(device.type, 1024)
    factor = torch.ones(size, size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    fastest, began = 0.0, time.perf_counter()
    while not fastest or time.perf_counter() - began < SECONDS:
        wait()
        started = time.perf_counter()
        torch.mm(factor, factor)
        wait()
        fastest = max(fastest, 2 * size**3 / (time.perf_counter() - started))
    return fastest, f"measured: a {str(dtype).removeprefix('torch.')} product of {size} x {size}"


@dataclass(frozen=True)
class Work:
    tokens: int = 0
    predicted: int = 0
    pairs: int = 0

    @classmethod
    def of_rows(cls, rows: Iterable[Any]) -> Work:
        tokens = predicted = pairs = 0
        for rollouts in (part.rollouts for row in rows for part in row.parts):
            parts = [(each.context, each.length) for rollout in rollouts for each in rollout.segments]
            prompt, own = len(rollouts[0].input), sum(length for _, length in parts)
            tokens, predicted = tokens + prompt + own, predicted + own
            pairs += sum(n * before + n * (n + 1) // 2 for before, n in [(0, prompt), *parts])
        return cls(tokens, predicted, pairs)


@dataclass(frozen=True)
class Matrices:
    """Element counts of a model's weight matrices. ``trained`` and ``frozen`` exclude head and token embedding."""

    trained: int
    frozen: int
    head: int
    attention: int  # layers x heads x head size: multiplications of a query with a key
    head_is_trained: bool = True

    @classmethod
    def of(cls, model: Any) -> Matrices | None:
        """Count a model's matrix elements. None: a mixture of experts, because a token uses only some matrices."""
        base = unwrap(model)
        if num_experts(base.config):
            return None
        head, table = base.get_output_embeddings().weight, base.get_input_embeddings().weight
        inside = [p for p in model.parameters() if p.dim() == 2 and p is not head and p is not table]
        trained = sum(p.numel() for p in inside if p.requires_grad)
        shape = Shape.of(base.config)
        frozen = sum(p.numel() for p in inside) - trained
        parts = parts_of(base)  # a tensor-parallel rank has only a part of the heads
        queries = shape.queries if parts is None else shape.queries // parts.engine.size
        return cls(trained, frozen, head.numel(), shape.layers * queries, head.requires_grad)

    def flops(self, work: Work) -> int:
        layers = (6 * self.trained + 4 * self.frozen) * work.tokens
        head = (6 if self.head_is_trained else 4) * self.head * work.predicted
        return layers + head + 12 * self.attention * work.pairs

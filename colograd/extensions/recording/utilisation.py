"""Model FLOPs of a training step, and the device's peak FLOP/s.

FLOPs = 6 x the matrices of the layers x tokens through the model          (4 x for frozen matrices)
      + 6 x the head's matrix x predicted tokens                          (the head computes only these)
      + 12 x layers x heads x head size x pairs of a query and a key that the query attends to

A multiplication with its addition is 2 FLOPs in a forward, and 4 in its backward (2 for weights without a gradient). A
pair has two products, with the key and with the value. Tokens are counted in the packed rows, so a shared prompt counts
once. Repeated work (checkpointing, tiles of logits) isn't counted, and neither are norms, rotations and the optimizer.
Attention windows are counted as full attention. Only dense models are supported.
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

# FLOP/s of dense bfloat16 products, from the makers' data sheets. A device's name must contain all words of an entry.
PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12,
}  # fmt: skip
SECONDS = 0.2  # Seconds of the measurement of a device that `PEAKS` lacks.
SIZES = {"cpu": 1024, "cuda": 4096}  # Rows and columns of the measured matrices.


def peak_of(device: str) -> float | None:
    found = (peak for name, peak in PEAKS.items() if all(re.search(rf"\b{word}\b", device) for word in name.split()))
    return next(found, None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return a device's peak FLOP/s, from its data sheet or measured, and the number's source."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype == torch.bfloat16 else ""
    if name and (peak := peak_of(name)) is not None:
        return peak, f"{name}'s data sheet"
    if device.type == "cpu" and dtype == torch.bfloat16 and cpu_products.wanted():
        dtype = torch.float32  # On such CPUs Colograd computes products of bfloat16 matrices in float32.
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
    tokens: int = 0  # Packed tokens.
    predicted: int = 0  # Completion tokens among the packed tokens.
    pairs: int = 0  # Pairs of a query and a key that the query attends to.

    @classmethod
    def of_rows(cls, rows: Iterable[Any]) -> Work:
        """Add up the work of packed rows."""
        tokens = predicted = pairs = 0
        for rollouts in (part.rollouts for row in rows for part in row.parts):
            parts = [(each.context, each.length) for rollout in rollouts for each in rollout.segments]
            prompt, own = len(rollouts[0].input), sum(length for _, length in parts)
            tokens, predicted = tokens + prompt + own, predicted + own
            pairs += sum(n * before + n * (n + 1) // 2 for before, n in [(0, prompt), *parts])
        return cls(tokens, predicted, pairs)


@dataclass(frozen=True)
class Matrices:
    """Numbers of elements of a model's matrices, to compute FLOPs from a step's `Work`."""

    trained: int  # Elements of the layers' matrices with a gradient.
    frozen: int  # Elements of the layers' matrices without a gradient.
    head: int  # Elements of the head's matrix.
    attention: int  # Multiplications in attention per pair: layers x heads x head size.
    head_is_trained: bool = True

    @classmethod
    def of(cls, model: Any) -> Matrices | None:
        """Count the elements of a model's matrices. Return None for a mixture of experts, which isn't supported."""
        base = unwrap(model)
        if num_experts(base.config):
            return None
        head, table = base.get_output_embeddings().weight, base.get_input_embeddings().weight
        inside = [p for p in model.parameters() if p.dim() == 2 and p is not head and p is not table]
        trained = sum(p.numel() for p in inside if p.requires_grad)
        shape = Shape.of(base.config)
        frozen = sum(p.numel() for p in inside) - trained
        parts = parts_of(base)  # with tensor parallelism a rank has only a part of `shape`'s heads
        queries = shape.queries if parts is None else shape.queries // parts.engine.size
        return cls(trained, frozen, head.numel(), shape.layers * queries, head.requires_grad)

    def flops(self, work: Work) -> int:
        """Return the FLOPs of a forward and its backward over ``work``."""
        layers = (6 * self.trained + 4 * self.frozen) * work.tokens
        head = (6 if self.head_is_trained else 4) * self.head * work.predicted
        return layers + head + 12 * self.attention * work.pairs

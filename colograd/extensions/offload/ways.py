"""Combinations of offloading settings ("ways") for a run's memory plan, and the seconds of their copies over PCIe."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...config.sharding import TENSOR
from ...memory.choice import best_plan, fits
from ...memory.description import RunDescription
from ...memory.estimate import bytes_per_rank
from ...memory.shape import again
from ...memory.table import MemoryPlan, gib
from .host_stream import device_bytes, on_way
from .layer_inputs import KEPT

BUS = 50.0  # assumed GB/s per direction of 16 lanes of PCIe 5, which have 63 at most
STREAM: dict[str, Any] = {"streams": True, "offloads": False}
GRADIENTS: dict[str, Any] = {"offloads_gradients": True}
ACTIVATIONS: dict[str, Any] = {"offloads_activations": True, "checkpointing": 1}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {}, "activations": ACTIVATIONS,
    "stream": STREAM, "stream, activations": STREAM | ACTIVATIONS,
    "gradients": GRADIENTS, "gradients, activations": GRADIENTS | ACTIVATIONS,
    "stream, gradients": STREAM | GRADIENTS, "stream, gradients, activations": STREAM | GRADIENTS | ACTIVATIONS,
}  # fmt: skip
SUMS = functools.partial(device_bytes, itemsize=4)
LEFT_ON_DEVICE = types.SimpleNamespace(inputs=KEPT, state=device_bytes, on_way=on_way, sums=SUMS)


@dataclass(frozen=True, slots=True)
class Way:
    """Offloading settings, their memory plan, and the bytes over PCIe of a step that trains a whole generation."""

    name: str
    run: RunDescription
    plan: MemoryPlan
    fits: bool
    to_gpu: int
    to_host: int

    def seconds(self, speed: float) -> float:
        """Return the seconds of a step's copies at ``speed`` (GB/s per direction), without overlap with computation."""
        return max(self.to_gpu, self.to_host) / (speed * 1e9)


def ways(run: RunDescription, strategy: str = "none") -> Iterator[Way]:
    seen = []
    for name, changes in WAYS.items():
        changed = dataclasses.replace(run, **changes)
        able = run.can_stream or not (changes.keys() & {"streams", "offloads_gradients"})
        if able and changed not in seen and (run.ranks_per_sequence == 1 or "offloads_gradients" not in changes):
            seen.append(changed)
            plan = best_plan(changed, strategy)
            yield Way(name, changed, plan, fits(changed, strategy), *bus_bytes(changed, plan.tokens))


def bus_bytes(run: RunDescription, tokens: int) -> tuple[int, int]:
    """Return the PCIe bytes (to GPU, to host) of a step that trains a whole generation. ``tokens``: per micro-batch.

    Each micro-batch copies gradients to the host. Gradient sums are copied to the GPU by each micro-batch except the
    first, once for the norm, and once for the optimizer. The last `KEPT` layer inputs are copied only to the host."""
    sizes, lengths = run.sizes, run.lengths
    whole = run.sequences * lengths.completion + -(-run.sequences // lengths.group) * lengths.prompt
    own = max(1, -(-tokens // run.ranks_per_sequence))  # tokens of a micro-batch on this rank
    passes, state = max(1, -(-whole // own)), sizes.optimizer * run.streams
    gradients = sizes.gradients * run.offloads_gradients
    inputs = again(run.shape, run.checkpointing) * run.offloads_activations
    one = whole * run.shape.hidden * sizes.itemsize
    to_gpu = state + (passes + 1) * gradients + max(inputs - KEPT, 0) * one
    return to_gpu, state + passes * gradients + inputs * one


def cheapest(run: RunDescription, strategy: str, host: float = math.inf) -> dict[str, Any]:
    """Return changes of ``run``'s fields so that the run fits into memory, with the fewest seconds of PCIe copies.

    Return {} if the run fits unchanged, if no changes help, or if ``strategy`` is FSDP or tensor parallelism. ``host``:
    bytes of host memory for this rank."""
    if strategy == "fsdp" or strategy in TENSOR:
        return {}

    def on_host(way: Way) -> float:
        inputs = again(run.shape, way.run.checkpointing) * -(-way.plan.tokens // run.ranks_per_sequence)
        sums = run.sizes.optimizer * way.run.streams + run.sizes.gradients * way.run.offloads_gradients
        return sums + inputs * run.shape.hidden * run.sizes.itemsize * way.run.offloads_activations

    fitting = [way for way in ways(run, strategy) if way.fits and on_host(way) <= host]
    return WAYS[min(fitting, key=lambda way: way.seconds(BUS)).name] if fitting else {}


def remedies(run: RunDescription, strategy: str, fit: Callable[..., bool]) -> Iterator[str]:
    if not run.devices.on_gpu:
        return
    if not (run.offloads or run.streams) and fit(offloads=True):
        yield "offload_optimizer: sampling"
    if run.can_stream and not run.streams and fit(streams=True):
        moved = gib(bytes_per_rank(run, strategy).optimizer)
        yield f"offload_optimizer: stream ({moved} GiB each way over the bus per step)"
    if run.can_stream and not run.offloads_gradients and strategy != "fsdp" and run.ranks_per_sequence == 1:
        moved = f"{gib(run.sizes.gradients)} GiB each way per micro-batch"
        if fit(offloads_gradients=True):
            yield f"offload_gradients: true ({moved})"
        elif not run.streams and not fit(streams=True) and fit(offloads_gradients=True, streams=True):
            yield f"offload_gradients: true ({moved}) with offload_optimizer: stream"

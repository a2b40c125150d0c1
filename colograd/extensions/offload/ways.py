"""Ways to train on one GPU: the part of training in host memory, a step's bytes over the bus, and their seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...config.sharding import TENSOR
from ...memory.choice import best_plan, fits
from ...memory.description import RunDescription
from ...memory.shape import again
from ...memory.table import MemoryPlan, gib
from .host_stream import device_bytes
from .host_sums import buffer_bytes, on_way
from .layer_inputs import KEPT

BUS = 50.0  # GB/s each way of a GPU on 16 lanes of PCIe 5, of 63 at most; half of it on PCIe 4. Not measured here.
# The settings of each way, which move parts of training to the host; larger choices cost more.
STREAM: dict[str, Any] = {"streams": True, "offloads": False}
GRADIENTS: dict[str, Any] = {"offloads_gradients": True}
ACTIVATIONS: dict[str, Any] = {"offloads_activations": True, "checkpointing": 1}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "activations": ACTIVATIONS,
    "stream": STREAM,
    "stream, activations": STREAM | ACTIVATIONS,
    "gradients": GRADIENTS,
    "gradients, activations": GRADIENTS | ACTIVATIONS,
    "stream, gradients": STREAM | GRADIENTS,
    "stream, gradients, activations": STREAM | GRADIENTS | ACTIVATIONS,
}


class LeftOnDevice:
    """See `memory.shape.left_on_device`."""

    inputs = KEPT
    state, sums, on_way = staticmethod(device_bytes), staticmethod(buffer_bytes), staticmethod(on_way)


@dataclass(frozen=True, slots=True)
class Bus:
    """Bytes of a step over the bus, for all sequences of a generation at full length."""

    to_gpu: int
    to_host: int

    def seconds(self, speed: float) -> float:
        """Return the seconds at ``speed`` GB/s each way, both ways at once. Gradients and activations move during
        computation."""
        return max(self.to_gpu, self.to_host) / (speed * 1e9)


@dataclass(frozen=True, slots=True)
class Way:
    """One of `WAYS`, with the plan of a run that takes it."""

    name: str
    plan: MemoryPlan
    fits: bool
    bus: Bus


def ways(run: RunDescription, strategy: str = "none") -> Iterator[Way]:
    """Yield the ways that a run can take in addition to its own settings."""
    seen = []
    for name, changes in WAYS.items():
        changed = dataclasses.replace(run, **changes)
        able = run.can_stream or not (changes.keys() & {"streams", "offloads_gradients"})
        able = able and not (run.ranks_per_sequence > 1 and changes.keys() & {"offloads_gradients"})
        if able and changed not in seen:
            seen.append(changed)
            plan = best_plan(changed, strategy)
            yield Way(name, plan, fits(changed, strategy), bus_bytes(changed, plan.tokens))


def host_bytes(run: RunDescription, tokens: int) -> int:
    """Compute the bytes of page-locked host memory that a rank uses, in micro-batches of ``tokens``."""
    own = -(-tokens // run.ranks_per_sequence)
    inputs = again(run.shape, run.checkpointing) * own * run.shape.hidden * run.sizes.itemsize
    optimizer, gradients = run.sizes.optimizer * run.streams, run.sizes.gradients * run.offloads_gradients
    return optimizer + gradients + inputs * run.offloads_activations


def cheapest(run: RunDescription, strategy: str, host: float = math.inf) -> dict[str, Any]:
    """Choose the fitting way with the fewest seconds on the bus, and return its settings. Return {} if the run fits
    without one, if no way fits, or if the strategy (FSDP, tensor) has its own ways.

    Args:
        host: bytes of host memory that a rank may take.
    """
    if strategy == "fsdp" or strategy in TENSOR:
        return {}
    fitting = [
        way
        for way in ways(run, strategy)
        if way.fits and host_bytes(dataclasses.replace(run, **WAYS[way.name]), way.plan.tokens) <= host
    ]
    return WAYS[min(fitting, key=lambda way: way.bus.seconds(BUS)).name] if fitting else {}


def named(kept: dict[str, Any]) -> str:
    """Return the name of the way with these settings."""
    name = next(name for name, changes in WAYS.items() if changes == kept)
    return name if kept else "nothing"


def bus_bytes(run: RunDescription, tokens: int) -> Bus:
    """Count the bytes of a step over the bus, in micro-batches of ``tokens``.

    Gradients go to the host in each micro-batch; from the second one on, their sums come to the GPU first. The sums
    come twice more, for the norm and for the optimizer. A layer's input goes and comes, except for the last layers'
    inputs.
    """
    sizes, lengths, shape = run.sizes, run.lengths, run.shape
    prompts = -(-run.sequences // lengths.group)
    whole = run.sequences * lengths.completion + prompts * lengths.prompt
    own = max(1, -(-tokens // run.ranks_per_sequence))  # this rank's tokens of each row
    passes, to_gpu, to_host = max(1, -(-whole // own)), 0, 0
    if run.streams:
        to_gpu, to_host = sizes.optimizer, sizes.optimizer
    if run.offloads_gradients:
        to_gpu, to_host = to_gpu + (passes + 1) * sizes.gradients, to_host + passes * sizes.gradients
    if run.offloads_activations:
        inputs, one = again(shape, run.checkpointing), whole * shape.hidden * sizes.itemsize
        to_gpu, to_host = to_gpu + max(inputs - KEPT, 0) * one, to_host + inputs * one
    return Bus(to_gpu, to_host)


def remedies(run: RunDescription, strategy: str, fit: Callable[..., bool]) -> Iterator[str]:
    """Yield the single changes that make the run fit. ``fit`` is of `memory.choice`."""
    if not run.devices.on_gpu:
        return
    if not (run.offloads or run.streams) and fit(offloads=True):
        yield "offload_optimizer: sampling"
    if run.can_stream and not run.streams and fit(streams=True):
        moved = gib(run.sizes.optimizer // run.devices.ranks)
        yield f"offload_optimizer: stream ({moved} GiB each way over the bus per step)"
    goes_to_host = strategy != "fsdp" and run.ranks_per_sequence == 1
    if run.can_stream and not run.offloads_gradients and goes_to_host:
        moved = f"{gib(run.sizes.gradients)} GiB each way per micro-batch"
        if fit(offloads_gradients=True):
            yield f"offload_gradients: true ({moved})"
        elif not run.streams and not fit(streams=True) and fit(offloads_gradients=True, streams=True):
            yield f"offload_gradients: true ({moved}) with offload_optimizer: stream"

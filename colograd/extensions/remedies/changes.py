"""Proposals for a run that doesn't fit its device's memory: changes of settings, each enough to make the run fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ...config.sharding import TENSOR
from ...memory.choice import fits
from ...memory.description import ORDER, PolicySizes, RunDescription
from ...memory.shape import Shape
from ...runtime import registry

LORA_RANK = 16
MOST_RANKS = 1024
SHORTEST = 256  # No shorter context (in tokens) is proposed.


def remedies(run: RunDescription, strategy: str) -> str:
    if not (found := [*_changes(run, strategy)]):
        return "no single change would fit this device: take a smaller model or larger GPUs"
    return f"what would fit: {'; or '.join(found)}"


def _changes(run: RunDescription, strategy: str) -> Iterator[str]:
    """Yield changes of settings, the least costly first."""

    def fit(strategy: str = strategy, **changes: object) -> bool:
        return fits(dataclasses.replace(run, **changes), strategy)  # type: ignore[arg-type]

    on_gpu, ranks = run.devices.on_gpu, run.devices.ranks
    if run.checkpointing != 1 and fit(checkpointing=1):
        yield "gradient_checkpointing: true"
    if on_gpu and not run.sleeps and fit(sleeps=True):
        yield "vllm_enable_sleep_mode: true"
    for offer in registry.hooks("host_remedies"):
        yield from offer(run, strategy, fit)
    if on_gpu and run.reference and fit(reference=0):
        yield "offload_reference: true"
    if on_gpu and run.teacher and fit(teacher=0):
        yield "offload_teacher: true"
    if run.sizes.packed and not run.served and fit(served=True):
        yield "weights: shared (the engine reads the quantised base too)"
    if run.tokens > run.length and fit(tokens=run.length):
        yield f"max_tokens_per_microbatch: {run.length}"
    if ranks > 1:
        more_sharded = ORDER[ORDER.index(strategy) + 1 if strategy in ORDER else 0 :]
        if other := next((other for other in more_sharded if other in run.strategies and fit(other)), ""):
            yield f"sharding: {other} over the {ranks} ranks"
        parts = run.ranks_per_engine if strategy in TENSOR else 1
        sizes = range(run.ranks_per_sequence + 1, ranks + 1) if strategy != "fsdp" and run.can_share_rows else ()
        able = (size for size in sizes if run.devices.takes_rows_of(size * parts))
        if size := next((size for size in able if fit(ranks_per_sequence=size)), 0):
            yield f"sequence_parallel_size: {size} ({size} ranks share out each row's tokens)"
        if larger := next(_in_larger_engines(run), None):
            yield larger
    whole = run.sizes.trained == run.sizes.elements
    if whole and fit("none", sizes=with_adapter(run.sizes, run.shape), reference=0):
        yield f"use_peft: true (LoRA, rank {LORA_RANK})"
    if (length := _shorter(run, strategy)) is not None:
        yield f"vllm_max_model_length: {length}, with completions and prompts shorter alike"
    if on_gpu and (more := _more_ranks(run)):
        yield more


def with_adapter(sizes: PolicySizes, shape: Shape) -> PolicySizes:
    """Return the sizes of the frozen model plus LoRA adapters (same dtype) on all attention and MLP projections."""
    attention = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
    trained = shape.layers * LORA_RANK * (attention + 3 * (shape.hidden + shape.intermediate))
    share = trained / max(sizes.trained, 1)
    return dataclasses.replace(
        sizes, elements=sizes.elements + trained, trained=trained, weights=sizes.weights + trained * sizes.itemsize,
        gradients=int(sizes.gradients * share), optimizer=int(sizes.optimizer * share), largest=0, matrix=0,
    )  # fmt: skip


def _shorter(run: RunDescription, strategy: str) -> int | None:
    length = run.length // 2
    while length >= SHORTEST:
        part = length / run.length
        prompt, completion = int(run.lengths.prompt * part), int(run.lengths.completion * part)
        lengths = dataclasses.replace(run.lengths, prompt=prompt, completion=completion)
        if fits(dataclasses.replace(run, length=length, lengths=lengths), strategy):
            return length
        length //= 2
    return None


def _in_larger_engines(run: RunDescription) -> Iterator[str]:
    for ranks, strategies in run.larger_engines.items():
        if not run.devices.takes_rows_of(ranks * run.ranks_per_sequence):
            continue
        sequences, running = (n * ranks // run.ranks_per_engine for n in (run.sequences, run.running))
        engines = {"ranks_per_engine": ranks, "strategies": strategies}
        larger = dataclasses.replace(run, sequences=sequences, running=running, **engines)  # type: ignore[arg-type]
        if strategy := next((strategy for strategy in larger.strategies if fits(larger, strategy)), ""):
            yield f"vllm_tensor_parallel_size: {larger.ranks_per_engine} and sharding: {strategy}"


def _more_ranks(run: RunDescription) -> str:
    ranks = 2 * run.devices.ranks
    while ranks <= MOST_RANKS:
        share = run.devices.ranks / ranks
        sequences, running = (max(1, int(count * share)) for count in (run.sequences, run.running))
        devices = dataclasses.replace(run.devices, ranks=ranks)
        more = dataclasses.replace(run, devices=devices, sequences=sequences, running=running)
        own = (f"sharding: {strategy}" for strategy in run.strategies[1:] if fits(more, strategy))
        if settings := next(itertools.chain(own, _in_larger_engines(more)), ""):
            return f"{ranks} ranks with {settings}"
        ranks *= 2
    return ""

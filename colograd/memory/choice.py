"""Choice of a run's sharding strategy and memory plan, and of changes that make a run fit. Numbers only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ..config.sharding import TENSOR
from ..runtime import registry
from .description import ORDER, RunDescription
from .estimate import estimate
from .shape import CacheNeed, Shape
from .table import MemoryPlan, gib

AMPLE = 0.1  # share of a GPU; with a smaller KV cache an engine decodes too few sequences at once
LORA_RANK = 16  # rank of a proposed adapter
BUSY_TOKENS = 8192  # tokens of a micro-batch that keeps a GPU busy
MOST_RANKS = 1024  # largest number of ranks to propose


def plan_or_raise(run: RunDescription, strategy: str) -> MemoryPlan:
    """Return the plan of a run, with its KV cache.

    Raises:
        ValueError: a GPU has no room for training and the KV cache of one sequence.
    """
    plan = best_plan(run, strategy)
    if not fits(run, strategy):
        plan = dataclasses.replace(plan, remedies=remedies(run, strategy))
        if run.devices.on_gpu:
            raise ValueError(too_large(run, plan))
    if run.kv_bytes or (run.devices.on_gpu and run.overruled):
        return plan
    return plan.with_cache(run.need) if run.devices.on_gpu else plan.with_cpu_cache(run.need)


def best_plan(run: RunDescription, strategy: str) -> MemoryPlan:
    """Return the plan with the longest micro-batches that leave an ample KV cache; else with the shortest ones."""
    for tokens in run.longest_rows:
        plan = estimate(run, strategy, tokens)
        if plan.takes(_ample(run)):
            break
    return plan


def _ample(run: RunDescription) -> CacheNeed:
    """Return the KV-cache need for a whole generation, or `AMPLE` of the GPU if less, but at least for one sequence."""
    need = run.need
    return dataclasses.replace(need, least=max(need.least, min(need.wanted, int(AMPLE * run.devices.total))))


def fits(run: RunDescription, strategy: str) -> bool:
    """Return whether the known parts fit. Unless the user set the KV cache's size, estimated parts must fit too."""
    plan = best_plan(run, strategy)
    return plan.takes(run.need) if run.plans_cache else _known_fits(run, plan)


def _known_fits(run: RunDescription, plan: MemoryPlan) -> bool:
    """Return whether weights, gradients, optimizer and KV cache fit. A CPU needs no more: its pages can be swapped."""
    cache = _given_cache(run, plan) or (0 if run.devices.on_gpu else run.need.least)
    return dataclasses.replace(plan, kv_bytes=cache).known <= run.devices.available


def _given_cache(run: RunDescription, plan: MemoryPlan) -> int:
    """Return the KV-cache bytes that the user set, or that the engine's share of the device leaves; 0: unknown."""
    return run.kv_bytes or max(int(run.share * run.devices.total) - plan.engine_weights, 0)


def auto(run: RunDescription) -> str:
    """Choose the least sharded strategy that leaves room for an ample KV cache and a micro-batch of the run's tokens
    (or `PLANNED_TOKENS`). If none does, choose the one that leaves most room. On a CPU only the known parts must
    fit."""
    if run.devices.ranks == 1:
        return run.strategies[0]

    def is_ample(strategy: str) -> bool:
        if not run.plans_cache:
            return fits(run, strategy)
        return estimate(run, strategy, run.longest_rows[0]).takes(_ample(run))

    def left(strategy: str) -> int:
        plan = estimate(run, strategy, run.longest_rows[-1])
        return min(plan.room, plan.remains("training"))

    return next(filter(is_ample, run.strategies), None) or max(run.strategies, key=left)


def least_checkpointing(run: RunDescription, strategy: str, able: Sequence[int]) -> int:
    """Choose the sparsest checkpointing that leaves room for an ample KV cache and a micro-batch of the run's tokens or
    `BUSY_TOKENS`. Return n for every n-th layer; 0: none.

    Args:
        able: values that the model supports, sparsest first; the last one is the fallback.
    """
    tokens = run.tokens or max(BUSY_TOKENS * run.ranks_per_sequence, run.length)

    def leaves_room(every: int) -> bool:
        plan = estimate(dataclasses.replace(run, checkpointing=every), strategy, tokens)
        if not (run.overruled or run.kv_bytes):
            return plan.takes(_ample(run))
        cache = _given_cache(run, plan)  # 0: its size is unknown
        return cache > 0 and dataclasses.replace(plan, kv_bytes=cache).remains("training") >= 0

    return next(filter(leaves_room, able), able[-1])


# -- remedies


def remedies(run: RunDescription, strategy: str) -> str:
    """Join the single changes that would make the run fit into one sentence without its full stop."""
    if not (found := [*_changes(run, strategy)]):
        return "no single change would fit this device: take a smaller model or larger GPUs"
    return f"what would fit: {'; or '.join(found)}"


def _changes(run: RunDescription, strategy: str) -> Iterator[str]:
    """Yield the single changes that make the run fit, the least costly first.

    Extensions offer functions at the seam "remedies": (run, strategy, fit) -> changes. ``fit`` tells whether the run
    fits with some fields of `RunDescription` changed.
    """

    def fit(strategy: str = strategy, **changes: object) -> bool:
        return fits(dataclasses.replace(run, **changes), strategy)  # type: ignore[arg-type]

    on_gpu, ranks = run.devices.on_gpu, run.devices.ranks
    if run.checkpointing != 1 and fit(checkpointing=1):
        yield "gradient_checkpointing: true"
    if on_gpu and not run.sleeps and fit(sleeps=True):
        yield "vllm_enable_sleep_mode: true"
    for offer in registry.hooks("remedies"):
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
        more_sharded = ORDER[ORDER.index(strategy) + 1 :]
        if other := next((other for other in more_sharded if other in run.strategies and fit(other)), ""):
            yield f"sharding: {other} over the {ranks} ranks"
        if size := next((size for size in _row_sizes(run, strategy) if fit(ranks_per_sequence=size)), 0):
            yield f"sequence_parallel_size: {size} ({size} ranks share out each row's tokens)"
        if larger := next(_in_larger_engines(run), None):
            yield larger
    if run.sizes.trained == run.sizes.elements:
        adapted = run.sizes.with_adapter(adapter_elements(run.shape, LORA_RANK))
        if fit("none", sizes=adapted, reference=0):
            yield f"use_peft: true (LoRA, rank {LORA_RANK})"
    if (length := _shorter(run, strategy)) is not None:
        yield f"vllm_max_model_length: {length}, with completions and prompts shorter alike"
    if on_gpu and (more := _more_ranks(run)):
        yield more


def _row_sizes(run: RunDescription, strategy: str) -> list[int]:
    """List the larger numbers of ranks that could share out a row's tokens."""
    parts = run.ranks_per_engine if strategy in TENSOR else 1
    able = range(run.ranks_per_sequence + 1, run.devices.ranks + 1)
    possible = strategy != "fsdp" and run.can_share_rows
    return [size for size in able if run.devices.takes_rows_of(size * parts)] if possible else []


def adapter_elements(shape: Shape, rank: int) -> int:
    """Count the elements of a LoRA (A and B) on all linear layers."""
    attention = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
    return shape.layers * rank * (attention + 3 * (shape.hidden + shape.intermediate))


def _shorter(run: RunDescription, strategy: str) -> int | None:
    """Return the longest context that fits: a half, a quarter ... of the run's. None: no such context of at least
    256."""
    length = run.length // 2
    while length >= 256:
        part = length / run.length
        prompt, completion = int(run.lengths.prompt * part), int(run.lengths.completion * part)
        lengths = dataclasses.replace(run.lengths, prompt=prompt, completion=completion)
        if fits(dataclasses.replace(run, length=length, lengths=lengths), strategy):
            return length
        length //= 2
    return None


def _in_larger_engines(run: RunDescription) -> Iterator[str]:
    """Yield the settings of larger engines that make the run fit, the fewest ranks first."""
    for larger in run.with_larger_engines():
        if strategy := next((strategy for strategy in larger.strategies if fits(larger, strategy)), ""):
            yield f"vllm_tensor_parallel_size: {larger.ranks_per_engine} and sharding: {strategy}"


def _more_ranks(run: RunDescription) -> str:
    """Return the fewest ranks, in doublings, that make the run fit, and their settings; empty: no number does."""
    ranks = 2 * run.devices.ranks
    while ranks <= MOST_RANKS:
        more = run.with_ranks(ranks)
        own = (f"sharding: {strategy}" for strategy in run.strategies[1:] if fits(more, strategy))
        if settings := next(itertools.chain(own, _in_larger_engines(more)), ""):
            return f"{ranks} ranks with {settings}"
        ranks *= 2
    return ""


def too_large(run: RunDescription, plan: MemoryPlan) -> str:
    """Write the error's text: the missing bytes, the remedies, and the table."""
    need, missing = run.need, -plan.remains("training")
    if missing > 0:
        problem = f"Training takes {gib(missing)} GiB more than the {gib(plan.total)} GiB of {plan.device}"
    else:
        problem = (
            f"The KV cache of one full sequence takes {gib(need.least)} GiB, but {gib(max(plan.room, 0))} of "
            f"{gib(plan.total)} GiB are left beside the rest: at least one must fit"
        )
    hint = ". Should this be estimated too high, vllm_gpu_memory_utilization overrules it"
    overrule = hint if _known_fits(run, plan) else ""
    return "\n".join([f"{problem}; {plan.remedies}{overrule}.", *plan.lines()])

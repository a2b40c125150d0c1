"""Choice of a run's sharding strategy and memory plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..runtime import registry
from .description import RunDescription
from .estimate import estimate
from .table import MemoryPlan, gib

AMPLE = 0.1  # A KV cache with this fraction of the device's memory counts as ample: it decodes many sequences at once.

BUSY_TOKENS = 8192  # A micro-batch of so many tokens keeps a GPU busy.


def plan_or_raise(run: RunDescription, strategy: str) -> MemoryPlan:
    plan, on_gpu = best_plan(run, strategy), run.devices.on_gpu
    if not fits(run, strategy):
        plan = dataclasses.replace(plan, remedies=remedies(run, strategy))
        if on_gpu:
            raise ValueError(too_large(run, plan))
    return plan if run.kv_bytes or (on_gpu and run.overruled) else plan.with_cache(run.need, on_gpu)


def best_plan(run: RunDescription, strategy: str) -> MemoryPlan:
    """Return the plan with the longest micro-batches that leave room for an ample KV cache (`AMPLE`).

    If no length leaves enough room, plan with the shortest micro-batches.
    """
    for tokens in run.longest_rows:
        plan = estimate(run, strategy, tokens)
        if plan.takes(_ample(run)):
            break
    return plan


def _ample(run: RunDescription) -> int:
    return max(run.need.least, min(run.need.wanted, int(AMPLE * run.devices.total)))


def fits(run: RunDescription, strategy: str) -> bool:
    """Return whether a run fits its device. Activations, which are only estimated, are ignored on a CPU, and if the
    user has set the KV cache's size or the engine's fraction of memory."""
    plan = best_plan(run, strategy)
    return plan.takes(run.need.least) if run.plans_cache else _known_fits(run, plan)


def _known_fits(run: RunDescription, plan: MemoryPlan) -> bool:
    """Return whether weights, gradients, optimizer and KV cache fit. Activations don't count, as they are estimates.

    If `_set_cache` is 0, the cache counts as 0 bytes on a GPU, and as one full sequence's cache on a CPU."""
    cache = _set_cache(run, plan) or (0 if run.devices.on_gpu else run.need.least)
    weights = plan.engine_weights + plan.policy_weights + plan.reference + plan.teacher
    sampling = cache + (0 if run.offloads or run.streams else plan.optimizer)
    training = plan.gradients + plan.optimizer + (0 if run.sleeps else cache)
    return weights + max(sampling, training) <= run.devices.available


def _set_cache(run: RunDescription, plan: MemoryPlan) -> int:
    """Return the KV cache's bytes if the user has set the bytes or the engine's fraction of memory, else 0."""
    return run.kv_bytes or max(int(run.share * run.devices.total) - plan.engine_weights, 0)


def auto(run: RunDescription) -> str:
    """Return the least sharded strategy that fits, or if none fits, the strategy that leaves most room.

    If the plan chooses the KV cache's size, the longest micro-batches and an ample cache must fit.
    """
    if run.devices.ranks == 1:
        return run.strategies[0]
    for strategy in run.strategies:
        plan = estimate(run, strategy, run.longest_rows[0])
        if plan.takes(_ample(run)) if run.plans_cache else fits(run, strategy):
            return strategy
    plans = {strategy: estimate(run, strategy, run.longest_rows[-1]) for strategy in run.strategies}
    return max(plans, key=lambda strategy: min(plans[strategy].room, plans[strategy].remains("training")))


def least_checkpointing(run: RunDescription, strategy: str, able: Sequence[int]) -> int:
    """Return the first interval in ``able`` that makes the run fit. Interval n checkpoints every n-th layer, 0 none.

    If no interval makes the run fit, return the last one.
    """
    tokens = run.tokens or max(BUSY_TOKENS * run.ranks_per_sequence, run.length)
    for every in able:
        plan = estimate(dataclasses.replace(run, checkpointing=every), strategy, tokens)
        if cache := _set_cache(run, plan):
            leaves_room = dataclasses.replace(plan, kv_bytes=cache).remains("training") >= 0
        else:
            leaves_room = not run.overruled and plan.takes(_ample(run))
        if leaves_room:
            return every
    return able[-1]


def remedies(run: RunDescription, strategy: str) -> str:
    proposals = "; ".join(offer(run, strategy) for offer in registry.hooks("remedies"))
    return proposals or "take a smaller model or larger GPUs"


def too_large(run: RunDescription, plan: MemoryPlan) -> str:
    need, missing, total = run.need, -plan.remains("training"), gib(run.devices.total)
    if missing > 0:
        problem = f"Training takes {gib(missing)} GiB more than the {total} GiB of {run.devices.name}"
    else:
        problem = (
            f"The KV cache of one full sequence takes {gib(need.least)} GiB, but {gib(max(plan.room, 0))} of "
            f"{total} GiB are left for the cache: at least one must fit"
        )
    hint = ". If the estimate is too high, set vllm_gpu_memory_utilization, which overrules it"
    overrule = hint if _known_fits(run, plan) else ""
    return "\n".join([f"{problem}; {plan.remedies}{overrule}.", *plan.lines()])

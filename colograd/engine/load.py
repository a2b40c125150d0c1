"""Callbacks after each engine step, with the load of vLLM's scheduler. Some versions of vLLM don't expose the load."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Load(NamedTuple):
    """The engine's load after one engine step: numbers of sequences, and use of the KV cache."""

    running: int  # Number of running sequences.
    waiting: int  # Number of sequences that wait to start.
    cache: float  # Used fraction of the KV cache, between 0 and 1.


def load_of(core: Any) -> Load | None:
    """Return the present load of ``core`` (vLLM's LLMEngine); None if this version of vLLM doesn't expose the load."""
    try:
        scheduler = core.engine_core.engine_core.scheduler
        waiting = len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ()))
        return Load(len(scheduler.running), waiting, float(scheduler.kv_cache_manager.usage))
    except (AttributeError, TypeError):
        return None


@contextlib.contextmanager
def watched(engine: Any, look: Callable[[Load], Any]) -> Iterator[Counter[str]]:
    """Call ``look`` with the load after each engine step, while the context lasts. Yield a counter of "preemptions":
    vLLM drops a sequence's KV cache for lack of memory, and computes it again later. If this version of vLLM doesn't
    expose the load, ``look`` isn't called. If it doesn't expose preemptions, the counter is empty."""
    counts = Counter[str]()
    inner = getattr(getattr(engine.core, "engine_core", None), "engine_core", None)
    scheduler: Any = getattr(inner, "scheduler", None)
    own = getattr(scheduler, "_preempt_request", None)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        return own(*args, **kwargs)  # type: ignore[misc]

    if own is not None:
        counts["preemptions"], scheduler._preempt_request = 0, counted
    try:
        with after_each_step(engine, lambda: (load := load_of(engine.core)) and look(load)):
            yield counts
    finally:
        if own is not None:
            vars(scheduler).pop("_preempt_request", None)  # Delete the wrapper that hides the class's method.


def stepping(engine: Any, tell: Callable[[int], Any]) -> contextlib.AbstractContextManager[None]:
    """Call ``tell`` after each engine step with the number of sequences that are still running."""
    return after_each_step(engine, lambda: (load := load_of(engine.core)) and tell(load.running))


@contextlib.contextmanager
def after_each_step(engine: Any, work: Callable[[], Any]) -> Iterator[None]:
    """Append ``work`` to the listeners that the engine calls after each step, while the context lasts."""
    engine.after_step.append(work)
    try:
        yield
    finally:
        engine.after_step.remove(work)

"""The engine's load after each step: running and waiting sequences, use of the KV cache, preemptions.

The load is read from vLLM's scheduler in this process. If a version has it elsewhere, no load is reported, and nothing
fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Load(NamedTuple):
    """The engine's load after one step."""

    running: int  # number of running sequences
    waiting: int  # number of waiting sequences
    cache: float  # used share of the KV cache, 0..1


@dataclass(slots=True)
class Preemptions:
    """Number of sequences that lost their keys and values to others for lack of KV cache, and started again."""

    number: int | None = None  # None: this vLLM doesn't expose it


def load_of(core: Any) -> Load | None:
    """Return the present load of vLLM's LLMEngine; None: it can't be read."""
    try:
        scheduler = core.engine_core.engine_core.scheduler
        waiting = len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ()))
        return Load(len(scheduler.running), waiting, float(scheduler.kv_cache_manager.usage))
    except (AttributeError, TypeError):
        return None


@contextlib.contextmanager
def watched(engine: Any, look: Callable[[Load], None]) -> Iterator[Preemptions]:
    """Call ``look`` with the load after each step of the engine, and count preemptions, while the context lasts."""
    preemptions = Preemptions()
    inner = getattr(getattr(engine.core, "engine_core", None), "engine_core", None)
    scheduler = getattr(inner, "scheduler", None)
    own = getattr(scheduler, "_preempt_request", None)

    def counted(*args: Any, **kwargs: Any) -> Any:
        preemptions.number = (preemptions.number or 0) + 1
        return own(*args, **kwargs)  # type: ignore[misc]

    with load_after_each_step(engine, look):
        if scheduler is None or own is None:
            yield preemptions
            return
        preemptions.number, scheduler._preempt_request = 0, counted
        try:
            yield preemptions
        finally:
            vars(scheduler).pop("_preempt_request", None)  # uncovers the class's method


def stepping(engine: Any, tell: Callable[[int], None]) -> contextlib.AbstractContextManager[None]:
    """Call ``tell`` after each step in the context, with the number of running sequences: each got a token."""
    return load_after_each_step(engine, lambda load: tell(load.running))


def load_after_each_step(engine: Any, look: Callable[[Load], None]) -> contextlib.AbstractContextManager[None]:
    """Call ``look`` with the load after each step, while the context lasts."""

    def after_step() -> None:
        if (load := load_of(engine.core)) is not None:
            look(load)

    return after_each_step(engine, after_step)


@contextlib.contextmanager
def after_each_step(engine: Any, work: Callable[[], None]) -> Iterator[None]:
    """Call ``work`` after each step of the engine, after the listeners that are there, while the context lasts."""
    engine.after_step.append(work)
    try:
        yield
    finally:
        engine.after_step.remove(work)

"""The engine's load after each of its steps, for those who watch: sequences that run and wait, KV cache, preemptions.

It is read off vLLM's scheduler, which lives in this process. Where a version has it elsewhere, nothing is seen, and
nothing fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .building import replaced


class Load(NamedTuple):
    """After one step."""

    running: int  # sequences
    waiting: int
    cache: float  # share of the KV cache that is in use, 0..1


@dataclass(slots=True)
class Preemptions:
    """Sequences that lost their keys and values to others, for want of room, and began again."""

    number: int | None = None  # None: this vLLM doesn't say


def load_of(core: Any) -> Load | None:
    """Of vLLM's LLMEngine; None where it can't be read."""
    try:
        scheduler = core.engine_core.engine_core.scheduler
        waiting = len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ()))
        return Load(len(scheduler.running), waiting, float(scheduler.kv_cache_manager.usage))
    except (AttributeError, TypeError):
        return None


@contextlib.contextmanager
def watched(engine: Any, look: Callable[[Load], None]) -> Iterator[Preemptions]:
    """While the context lasts, ``look`` is called after each of the engine's steps, and preemptions are counted."""
    found = Preemptions()
    scheduler = None
    with contextlib.suppress(AttributeError):
        scheduler = engine.core.engine_core.engine_core.scheduler
    own = getattr(scheduler, "_preempt_request", None)

    def counted(*args: Any, **kwargs: Any) -> Any:
        assert own is not None
        found.number = (found.number or 0) + 1
        return own(*args, **kwargs)

    def after_step() -> None:
        if (load := load_of(engine.core)) is not None:
            look(load)

    with contextlib.ExitStack() as stack:
        if own is not None:
            found.number = 0
            stack.callback(scheduler.__dict__.pop, "_preempt_request", None)  # last, so that the class's own is found
            stack.enter_context(replaced(scheduler, "_preempt_request", counted))
        stack.enter_context(replaced(engine, "after_step", after_step))
        yield found


@contextlib.contextmanager
def stepping(engine: Any, tell: Callable[[int], None]) -> Iterator[None]:
    """While the context lasts, ``tell`` gets after each of the engine's steps how many sequences run, each of which has
    a token more. Who watches already goes on."""
    with load_after_each_step(engine, lambda load: tell(load.running)):
        yield


@contextlib.contextmanager
def load_after_each_step(engine: Any, look: Callable[[Load], None]) -> Iterator[None]:
    """While the context lasts, ``look`` gets the load after each of the engine's steps, likewise."""

    def after_step() -> None:
        if (load := load_of(engine.core)) is not None:
            look(load)

    with after_each_step(engine, after_step):
        yield


@contextlib.contextmanager
def after_each_step(engine: Any, work: Callable[[], None]) -> Iterator[None]:
    """While the context lasts, ``work`` is called after each of the engine's steps, behind what is called already."""
    before = engine.after_step

    def after_step() -> None:
        if before is not None:
            before()
        work()

    with replaced(engine, "after_step", after_step):
        yield

"""What ranks agree on: a body that fails on all of them or on none, and every rank's value of a thing."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import watchdog

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join(limit: timedelta, backend: str = "gloo") -> None:
    """Have the ranks find each other, unless there is one or they have. ``limit`` is how long one waits for another,
    here and in each exchange.

    Raises:
        RuntimeError: some didn't come.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or dist.is_initialized():
        return
    try:
        store, place, size = next(dist.rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        # torchrun keeps one store over its restarts: the addresses in it may be those of processes that are gone.
        store = dist.PrefixStore(f"attempt-{attempt()}", store)
        dist.init_process_group(backend, store=store, rank=place, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise RuntimeError(
            f"Not all {os.environ['WORLD_SIZE']} ranks came to {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} within {limit.total_seconds():,.0f} s (ddp_timeout), or they can't reach "
            f"each other: look at the other ranks' output and at MASTER_ADDR, and name the network interface in "
            f"GLOO_SOCKET_IFNAME. ({error})"
        ) from error


def attempt() -> int:
    """How many times torchrun has started the ranks anew (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def part() -> None:
    """Let go of each other at the end of the process, but not after an exception, when others may still wait. Without
    it gloo's threads may outlive the interpreter, and the process aborts (status -6) although all went well."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def time_limit() -> timedelta:
    """How long an exchange may take: `ddp_timeout`."""
    group = dist.group.WORLD
    device = torch.device("cpu") if _has_gloo() else group._device_types[0]
    options = getattr(group._get_backend(device), "options", None)  # MPI has none
    limit: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return limit


class RankError(RuntimeError):
    """Another rank failed: this one ends with the same message instead of waiting for it."""

    says_all = True  # see `process.tell_briefly`


@contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """Run the body on all ranks; if it raises on any, every rank raises: the failing one its own exception, the others
    `RankError` with its text. Where ranks failed for want of memory alone, every rank raises `torch.OutOfMemoryError`,
    so that all can try again alike. The body may contain no collective that a failing rank would skip.
    """
    failure: BaseException | None = None
    watchdog.progress(what)
    try:
        yield
    except Exception as error:
        failure = error
    if world_size() > 1:
        memory = isinstance(failure, torch.OutOfMemoryError)
        try:
            reports = gather(None if failure is None else (memory, f"{type(failure).__name__}: {failure}"))
        except RuntimeError as lost:  # another rank is gone: what failed here is still worth saying
            raise (failure or lost) from None
        reported = [(other, *report) for other, report in enumerate(reports) if report is not None]
        faults = [f"Rank {other} failed in {what}: {text}" for other, of_memory, text in reported if not of_memory]
        if faults and (failure is None or memory):
            raise RankError(faults[0])
        if reported and not faults and failure is None:
            raise torch.OutOfMemoryError(f"Rank {reported[0][0]} failed in {what}: {reported[0][2]}")
    if failure is not None:
        raise failure


def gather(value: T) -> list[T]:
    """Every rank's ``value`` (any picklable object), in the order of ranks. Goes through host memory, not a GPU's."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=None if _has_gloo() else _beside(dist.group.WORLD))
    watchdog.progress()
    return values


def _has_gloo() -> bool:
    return torch.device("cpu") in dist.group.WORLD._device_types


@functools.lru_cache(maxsize=1)
def _beside(group: Any) -> Any:
    """All ranks again, over gloo. Made once, and by all ranks at the same place, for a collective asks for it."""
    return dist.new_group(backend="gloo", timeout=time_limit())

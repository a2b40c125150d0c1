"""Agreement of ranks: bodies that fail on all ranks or on none, and values gathered from all ranks."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import watchdog

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join(limit: timedelta, backend: str = "gloo") -> None:
    """Create the process group, unless there is one rank only or the group exists. RuntimeError: a rank didn't join
    within ``limit``, which is also the limit of each collective (`ddp_timeout`)."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or dist.is_initialized():
        return
    try:
        store, place, size = next(dist.rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        # A store of torchrun's own process may contain addresses of processes that have ended.
        store = dist.PrefixStore(f"attempt-{attempt()}", store)
        dist.init_process_group(backend, store=store, rank=place, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise RuntimeError(
            f"Not all {os.environ['WORLD_SIZE']} ranks joined at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} within {limit.total_seconds():,.0f} s (ddp_timeout), or they can't reach "
            f"each other. Check the other ranks' output and MASTER_ADDR, and set GLOO_SOCKET_IFNAME to the network "
            f"interface. ({error})"
        ) from error


def attempt() -> int:
    """Return how many times torchrun has restarted the ranks (`--max-restarts`) if its store outlives them, else 0.

    A node that joins a running job counts from 0, so ranks with a store of their own mustn't use the count.
    """
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) if outlives else 0


def part() -> None:
    """Destroy the process group at the end of the process: gloo's threads may outlive the interpreter, and a successful
    process would abort (status -6). Not after an exception, because other ranks may still wait."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def time_limit() -> timedelta:
    """Return how long a collective may take: `ddp_timeout`."""
    group = dist.group.WORLD
    device = torch.device("cpu") if _has_gloo() else group._device_types[0]
    options = getattr(group._get_backend(device), "options", None)  # MPI has none
    limit: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return limit


class RankError(RuntimeError):
    """The failure of another rank, with that rank's message."""

    says_all = True  # see `process.tell_briefly`


class Stopped(Exception):
    """The end of a round before its last step: the run's time is over (`stop_within`). All ranks raise it together."""


SHARED = (torch.OutOfMemoryError, Stopped)  # failures of one rank that all ranks raise; the last one goes first


@contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """Run the body ``what`` on all ranks; if it raises on any rank, every rank raises. A collective.

    The body may contain no collective that a failing rank would skip.

    Raises:
        RankError: another rank failed. The failing rank raises its own exception.
        torch.OutOfMemoryError, Stopped: the ranks' only failures. Every rank raises it, so that all can try again.
    """
    failure: BaseException | None = None
    watchdog.progress(what)
    try:
        yield
    except Exception as error:
        failure = error
    if world_size() > 1:
        shared = next((kind for kind in SHARED if isinstance(failure, kind)), None)
        try:
            reports = gather(None if failure is None else (shared, f"{type(failure).__name__}: {failure}"))
        except RuntimeError as lost:  # another rank has ended; a failure of this rank is the better message
            raise (failure or lost) from None
        failures = [(other, *report) for other, report in enumerate(reports) if report is not None]
        faults = [f"Rank {other} failed in {what}: {text}" for other, kind, text in failures if kind is None]
        if faults and (failure is None or shared):
            raise RankError(faults[0])
        if failures and not faults:
            kind = max((kind for _, kind, _ in failures if kind), key=SHARED.index)
            if shared is not kind:
                other, _, text = next(report for report in failures if report[1] is kind)
                raise kind(f"Rank {other} failed in {what}: {text}") from failure
    if failure is not None:
        raise failure


def gather(value: T) -> list[T]:
    """Return all ranks' ``value`` (any picklable object), in the order of ranks, through host memory. A collective."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=None if _has_gloo() else _gloo_group(dist.group.WORLD))
    watchdog.progress()
    return values


def deliver(messages: Mapping[int, T], senders: Iterable[int]) -> dict[int, T]:
    """Send each message to its rank, and return those of the ``senders`` for this rank, through host memory.

    A collective. A rank receives its own messages only, so that its bytes don't grow with the number of ranks.
    """
    group = None if _has_gloo() else _gloo_group(dist.group.WORLD)
    outgoing = {
        to: torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8) for to, message in messages.items()
    }
    lengths = {to: torch.tensor([len(packed)]) for to, packed in outgoing.items()}
    incoming = {sender: torch.zeros(1, dtype=torch.int64) for sender in senders}
    for tag in (0, 1):  # first the lengths
        sent = outgoing if tag else lengths
        if tag:
            incoming = {sender: torch.empty(int(length), dtype=torch.uint8) for sender, length in incoming.items()}
        works = [dist.isend(packed, to, group, tag) for to, packed in sent.items()]
        works += [dist.irecv(buffer, sender, group, tag) for sender, buffer in incoming.items()]
        for work in works:
            work.wait()
    watchdog.progress()
    return {sender: pickle.loads(buffer.numpy()) for sender, buffer in incoming.items()}


def _has_gloo() -> bool:
    return torch.device("cpu") in dist.group.WORLD._device_types


@functools.lru_cache(maxsize=1)
def _gloo_group(group: Any) -> Any:
    """Create a gloo group of all ranks, once. All ranks create it in the same collective."""
    return dist.new_group(backend="gloo", timeout=time_limit())

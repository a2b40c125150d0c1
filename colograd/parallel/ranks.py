"""Run code so that an error on one rank is raised on all ranks, and gather values from all ranks."""

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
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def join(limit: timedelta, backend: str = "gloo") -> None:
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or dist.is_initialized():
        return
    try:
        store, place, size = next(dist.rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        # A prefix per restart: torchrun's store may contain addresses of processes that ended before the restart.
        store = dist.PrefixStore(f"attempt-{attempt()}", store)
        dist.init_process_group(backend, store=store, rank=place, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise RuntimeError(
            f"The {os.environ['WORLD_SIZE']} ranks can't join at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} (time limit: `ddp_timeout`, {limit.total_seconds():,.0f} s). If the port "
            "is in use, set a different MASTER_PORT. Look for errors in the other ranks' output. If ranks can't reach "
            "each other, check MASTER_ADDR, and set GLOO_SOCKET_IFNAME to the network interface between the nodes. "
            f"({error})"
        ) from error


def attempt() -> int:
    """Return torchrun's number of restarts if torchrun's agent hosts the rendezvous store, else 0.

    The number isn't used for a store that rank 0 hosts: such a store is new after each restart, and nodes may
    count restarts differently."""
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) if outlives else 0


def part() -> None:
    """Destroy the process group. Otherwise gloo's threads may abort a successful process at its end (status -6).

    After an uncaught error the process group stays, because other ranks may still wait in it."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def time_limit() -> timedelta:
    """Return the time limit of a collective (`ddp_timeout`)."""
    group = dist.group.WORLD
    device = torch.device("cpu") if _has_gloo() else group._device_types[0]
    options = getattr(group._get_backend(device), "options", None)  # MPI process groups have no options
    limit: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return limit


class RankError(RuntimeError):
    """A different rank failed. The text has that rank's number and error message."""

    says_all = True  # if uncaught, this error is printed as one line without a traceback


class Stopped(Exception):
    """Sampling or training was interrupted, because little time is left after a stop signal."""


SHARED = (torch.OutOfMemoryError, Stopped)  # if all failed ranks raise such an error, every rank raises one


@contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """If the body raises on one rank, raise on all ranks. A collective.

    The failing rank raises its exception, and the other ranks raise `RankError`. If all failures are of types in
    `SHARED` (out of memory, `Stopped`), every rank raises the same one of these types. The body must contain no
    collective that a failing rank would skip, because the other ranks would wait in it."""
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
        except RuntimeError as lost:  # the collective failed, e.g. because another rank's process has ended
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
    """Gather a picklable value from each rank through host memory, in rank order. A collective."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=None if _has_gloo() else _gloo_group(dist.group.WORLD))
    watchdog.progress()
    return values


def deliver(messages: Mapping[int, T], senders: Iterable[int]) -> dict[int, T]:
    """Send a picklable message to each receiver, and return the message of each sender. A collective.

    ``messages`` has the receivers' ranks as keys. The result has the ranks ``senders`` as keys."""
    group = None if _has_gloo() else _gloo_group(dist.group.WORLD)
    outgoing = {
        to: torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8) for to, message in messages.items()
    }
    lengths = {to: torch.tensor([len(packed)]) for to, packed in outgoing.items()}
    incoming = {sender: torch.zeros(1, dtype=torch.int64) for sender in senders}
    for tag in (0, 1):  # first the messages' lengths, then the messages
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
    """Return a gloo group of all ranks, made in the first call (a collective). ``group``: the default process group."""
    return dist.new_group(backend="gloo", timeout=time_limit())

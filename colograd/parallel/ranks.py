"""What ranks agree on: a body that fails on all of them or on none, and every rank's value of a thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import alarm

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


class RankError(RuntimeError):
    """Another rank failed: this one ends with the same message instead of waiting for it."""


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run the body on all ranks; if it raises on any, every rank raises before its next collective.

    The failing rank keeps its own exception; the others raise `RankError` with its text. Where ranks failed for want of
    memory alone, every rank raises `torch.OutOfMemoryError`, so that all can try again alike. The body may contain no
    collective that a failing rank would skip.
    """
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if world_size() > 1:
        memory = isinstance(failure, torch.OutOfMemoryError)
        reports = _reports(None if failure is None else (memory, f"{type(failure).__name__}: {failure}"), failure)
        reported = [(other, *report) for other, report in enumerate(reports) if report is not None]
        faults = [f"Rank {other} failed in {what}: {text}" for other, of_memory, text in reported if not of_memory]
        if faults and (failure is None or memory):
            raise RankError(faults[0])
        if reported and not faults and failure is None:
            raise torch.OutOfMemoryError(f"Rank {reported[0][0]} failed in {what}: {reported[0][2]}")
    if failure is not None:
        raise failure


def _reports(own: T, failure: BaseException | None) -> list[T]:
    """Every rank's report. Where a rank is gone: the error that this one had itself, or what the other one told."""
    try:
        return gather(own)
    except RuntimeError as lost:
        if failure is not None:
            raise failure from lost
        if (told := alarm.heard()) is not None:
            raise RankError(told) from lost
        raise


def gather(value: T) -> list[T]:
    """Every rank's ``value`` (any picklable object), in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values

"""A device that follows the order of its streams, and reports races."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class Races(TorchDispatchMode):
    """Records operations of streams, and the operations that each stream has waited for.

    A race: two operations on different streams use the same memory, one of them writes, and neither stream nor host
    waited for the earlier one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.present = self.computing = SimpleNamespace(known=set())
        self.used: list[
            tuple[int, int, int, Any, bool]
        ] = []  # first and last byte, operation, stream, whether the operation wrote
        self.races: list[str] = []
        self.host: set[int] = set()  # finished operations
        self.copied: set[int] = set()
        self.allocated: list[int] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns):
            return result  # a view: nothing is read
        if func is torch.ops.aten.empty.memory_format and (kwargs or {}).get("dtype") is torch.uint8:
            self.allocated.append(result.nbytes)
        self.count += 1
        if func is torch.ops.aten.copy_.default and self.present is not self.computing:
            self.copied.add(self.count)
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs or {}
        changed = {argument.name for argument in func._schema.arguments if _is_written(argument)}
        read = [(tensor, name in changed) for name, value in given.items() for tensor in tree_leaves(value)]
        for tensor, writes in [*read, *((tensor, True) for tensor in tree_leaves(result))]:
            if isinstance(tensor, torch.Tensor) and tensor.nbytes:
                first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                for start, stop, operation, stream, wrote in self.used:
                    apart = stop <= first or last <= start or stream is self.present or not (writes or wrote)
                    if not apart and operation not in self.present.known | self.host:
                        self.races.append(f"{func} overtakes operation {operation}")
                self.used.append((first, last, self.count, self.present, writes))
        self.present.known.add(self.count)
        return result

    # functions of `torch.cuda`

    def Stream(self) -> Any:
        return SimpleNamespace(known=set())

    def current_stream(self) -> Any:
        return self.present

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.present = self.present, stream
        yield
        self.present = before

    def Event(self) -> Any:
        event = SimpleNamespace(known=set())
        event.record = lambda stream: setattr(event, "known", set(stream.known))
        event.wait = lambda stream: stream.known.update(event.known)
        event.synchronize = lambda: self.host.update(event.known)
        return event

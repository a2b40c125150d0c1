"""A GPU that isn't there: tensors of device `cuda` have shapes, dtypes and sizes, but no numbers.

torch's `FakeTensorMode` makes them. A build of torch without CUDA lacks a device guard, which `GUARD` adds:

    with FakeGPU() as gpu:
        with torch.device("cuda"):
            model = ...
        with gpu.watched() as seen:
            ...
    seen.waits, seen.flash, seen.peak
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cuda_places
import native_library
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at::accelerator {  // else autograd asks for streams
__attribute__((visibility("default"))) bool isAccelerator(c10::DeviceType) { return false; }
}
"""
H100 = SimpleNamespace(name="fake", major=9, minor=0, total_memory=80 * 2**30)
KERNELS = ("silu_backward",)  # autograd would otherwise split them, with temporaries


# -- for the test


@functools.cache
def guard() -> Path:
    return native_library.build("fake-gpu", GUARD, "-lc10")


def run(script: Path, *arguments: str, patience: float = 600) -> list[dict[str, Any]]:
    """Run a script with a fake GPU, and return the dictionaries that it printed, one per line."""
    environment = os.environ | {"LD_PRELOAD": str(guard()), "OMP_NUM_THREADS": "1"} | cuda_places.WATCHED
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# -- for the script


@dataclass
class Seen:
    flash: Counter[str] = field(default_factory=Counter)  # number of calls: forward, backward
    waits: list[str] = field(default_factory=list)  # operations that would make the host wait for the device
    copied: int = 0  # bytes between the two memories
    devices: set[str] = field(default_factory=set)  # devices of all tensors that were computed from the GPU's
    products: set[str] = field(default_factory=set)  # dtypes of matrix products' factors
    held: int = 0  # bytes at the start
    most: int = 0  # largest number of bytes at once

    @property
    def peak(self) -> int:
        """Largest number of bytes at once, without those at the start."""
        return self.most - self.held


FLASH = {f"aten::_flash_attention_{way}": way for way in ("forward", "backward")}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear"}
ASKS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}


class FakeGPU(TorchDispatchMode):
    """Context in which tensors of device `cuda` are fakes and tensors of the host are real."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: set[int] = set()  # storages that count in `bytes`
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._locked: dict[int, int] = {}  # bytes of host memory by address
        self.locked_again = 0  # number of page-locks of locked memory
        self.capacity = 0  # bytes of device memory; 0 means no limit
        self._seen: Seen | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> FakeGPU:
        runtime = SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock)
        for name, done in {
            "cuda.get_device_properties": lambda *of: H100,
            "cuda.device": lambda *of: contextlib.nullcontext(),
            "cuda.cudart": lambda: runtime,
            "cuda.synchronize": lambda *of: self._note_wait("synchronize"),
            "Tensor.pin_memory": lambda *of: self._pin(of[0]),
            "Tensor.is_pinned": lambda *of: self._is_pinned(of[0]),
            **{f"cuda.{name}": getattr(torch.cpu, name) for name in ("Stream", "stream", "current_stream")},
            "cuda.Event": torch.cpu.Event,
        }.items():
            self._open.enter_context(mock.patch(f"torch.{name}", done))
        kernels = self._open.enter_context(torch.library._scoped_library("aten", "IMPL", "CUDA"))
        for name in KERNELS:
            kernels.impl(name, lambda *of: NotImplemented)
        self._open.enter_context(self._fakes)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.__exit__(*error)

    @property
    def locked(self) -> int:
        """Bytes of page-locked host memory."""
        return sum(self._locked.values())

    @contextlib.contextmanager
    def watched(self) -> Iterator[Seen]:
        self._seen = seen = Seen(held=self.bytes, most=self.bytes)
        try:
            yield seen
        finally:
            self._seen = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        place = kwargs.get("device")
        on_host = place is None or torch.device(place).type == "cpu"
        if on_host and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            self._pinned.add(result.untyped_storage())
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in outputs:
            self._count(tensor)
        if self._seen is not None:
            self._note(self._seen, func, inputs, outputs, (args, kwargs))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cuda" and storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
            if 0 < self.capacity < self.bytes:
                raise torch.OutOfMemoryError(f"{self.bytes:,} bytes on a GPU of {self.capacity:,}")

    def _freed(self, storage: int, nbytes: int) -> None:
        self._known.discard(storage)
        self.bytes -= nbytes

    def _note(
        self, seen: Seen, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], called: Any
    ) -> None:
        name = func._schema.name
        short = name.partition("::")[2]
        inside = 0
        if flash := FLASH.get(name):
            seen.flash[flash] += 1
            inside = _inside_backward(inputs) if flash == "backward" else 0
        seen.most = max(seen.most, self.bytes + inside)
        seen.devices |= {tensor.device.type for tensor in outputs}
        factors = [tensor for tensor in inputs if tensor.is_floating_point()][-2:]
        if short in PRODUCTS and factors[-1].shape[-2] > 1:  # positions times frequencies are no sums
            seen.products |= {str(tensor.dtype).removeprefix("torch.") for tensor in factors}
        if short in ASKS or self._crosses(inputs, outputs, called):
            seen.waits.append(name)

    def _crosses(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], called: Any) -> bool:
        """Whether the host waits for data that goes from one memory to the other."""
        kinds = [{tensor.device.type for tensor in tensors if tensor.dim() or not tensor.is_cpu}
                 for tensors in (inputs, outputs)]  # fmt: skip
        if kinds[0] | kinds[1] != {"cpu", "cuda"}:
            return False
        if self._seen is not None:
            self._seen.copied += sum(tensor.nbytes for tensor in outputs)
        written = () if len({tensor.device.type for tensor in inputs}) == 2 else outputs  # else one of the inputs
        host = [tensor for tensor in (*inputs, *written) if tensor.is_cpu]
        args, kwargs = called
        unblocked = kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True)
        return not unblocked or not all(self._is_pinned(tensor) for tensor in host)

    def _note_wait(self, name: str) -> None:
        if self._seen is not None:
            self._seen.waits.append(name)

    def _lock(self, address: int, nbytes: int, flags: int) -> int:
        overlaps = (first < address + nbytes and address < first + size for first, size in self._locked.items())
        self.locked_again += any(overlaps)
        self._locked[address] = nbytes
        return 0

    def _unlock(self, address: int) -> int:
        del self._locked[address]
        return 0

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._pinned.add(copy.untyped_storage())
        return copy

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage() in self._pinned:
            return True
        address = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
        return any(first <= address < first + nbytes for first, nbytes in self._locked.items())


def _inside_backward(inputs: list[torch.Tensor]) -> int:
    """Temporary bytes of flash attention's backward.

    Queries have gradients in float32, padded by 128 rows per sequence and to heads of a multiple of 32. Grouped keys
    and values have gradients per query head.
    """
    _, query, key, _, _, _, starts, *_ = inputs
    tokens, heads, head = query.shape
    spread = 0 if heads == key.shape[1] else 2 * len(key) * heads * head * key.itemsize
    return 4 * (tokens + 128 * (len(starts) - 1)) * heads * -(-head // 32) * 32 + spread

"""A CUDA device in host memory: tensors of device `cuda` have values, and CUDA's rules hold.

    import host_cuda                      # before anything imports torch
    record = host_cuda.install()
    ...
    record.waits, record.races            # Counters

`host_cuda.cpp` is the device; this module gives it to torch and fills in `torch.cuda`. The device changes the whole
process, so tests run it in child processes (`run`). It raises the errors that CUDA raises where a host tensor meets the
device's. It counts the bytes of its memory and the places where the host waits. It records races: memory that two
streams, or a stream and the host, use without an order.

It can't show the numbers and times of real kernels, races inside Triton's kernels, CUDA graphs, `torch.compile`,
vLLM's sleep mode, or the fragmentation of torch's memory pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_places
import native_library

SOURCE = Path(__file__).with_suffix(".cpp")
GIB = 2**30


# -- for the test


def library() -> Path:
    """Return the device's library. The first call for a torch compiles it, which takes up to a minute."""
    return native_library.build("host-cuda", SOURCE.read_text(), "-lc10", "-ltorch_cpu")


def run(script: Path, *arguments: str, ranks: int = 1, attempt: int = 0, patience: float = 900) -> list[Any]:
    """Run a script that installs the device, and return the JSON values it printed, one per line.

    Args:
        ranks: number of processes. Several get the variables of a launcher.
        attempt: number of earlier starts by torchrun.

    Raises:
        AssertionError: the script failed. The message has its output.
    """
    import launcher
    import tiny

    library()
    environment = tiny.clean_environment() | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} | cuda_places.WATCHED
    environment |= {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
    command = [sys.executable, str(script), *arguments]
    with contextlib.ExitStack() as processes:
        started = [
            processes.enter_context(
                subprocess.Popen(
                    command, env=environment | of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            for of_rank in (launcher.variables_of(ranks) if ranks > 1 else [{}])
        ]
        for process in started:
            processes.callback(process.kill)
        with ThreadPoolExecutor(ranks) as pool:
            outputs = list(pool.map(lambda process: process.communicate(timeout=patience), started))
    for process, (output, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, f"{output[-3000:]}\n{errors[-6000:]}"
    return [json.loads(line) for output, _ in outputs for line in output.splitlines() if line.startswith(("{", "["))]


# -- for the script


@dataclass
class Record:
    """Operations on the device, and the functions of this project that called them."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # places where the host waits for the device
    races: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)  # calls of kernels that only CUDA has
    _inside_kernel: threading.local = field(default_factory=threading.local)

    def clear(self) -> None:
        for counter in (self.waits, self.races, self.kernels):
            counter.clear()

    def as_kernel(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap the Python code of a kernel, so that its own waits and accesses don't count."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            self.kernels[name] += 1
            outer, self._inside_kernel.value = getattr(self._inside_kernel, "value", False), True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside_kernel.value = outer

        return kernel

    def note(self, kind: str, what: str) -> bool:
        """Count a wait or a race; return whether it counts."""
        if getattr(self._inside_kernel, "value", False):
            return False
        (self.waits if kind == "wait" else self.races)[what, _caller()] += 1
        return True


PACKAGES = (f"{os.sep}colograd{os.sep}", f"{os.sep}site-packages{os.sep}vllm{os.sep}")


def _caller() -> str:
    """Return the innermost function of this project, or `vllm: FILE` if vLLM is nearer."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        for package in PACKAGES:
            if package in file:
                place = file.rpartition(package)[2]
                return f"vllm: {place}" if "vllm" in package else f"{place} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "?"


def _distinct(value: Any) -> Any:
    """Return a new function, because Dynamo allows no function under two names."""
    return (
        (lambda *args, **kwargs: value(*args, **kwargs)) if callable(value) and not isinstance(value, type) else value
    )


_installed: list[Record] = []


def install(total: int = 80 * GIB) -> Record:
    """Give this process its device, once. `torch.cuda` describes an H100 of ``total`` bytes.

    Raises:
        RuntimeError: torch was imported before, or is built for CUDA, or there is no compiler.
    """
    if _installed:
        return _installed[0]
    if "torch" in sys.modules:
        raise RuntimeError("host_cuda must be installed before torch is imported: torch looks for CUDA only once.")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Inductor would ask Triton for code, and Triton for a driver
    device = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    for name in ("bytes", "peak", "capacity", "stream"):
        getattr(device, f"host_cuda_{name}").restype = ctypes.c_int64
    device.host_cuda_pin.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    device.host_cuda_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    device.host_cuda_capacity.argtypes = [ctypes.c_int64]
    record, debug_mode = Record(), ["default"]

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
    def report(kind: bytes, what: bytes) -> int:
        counts = record.note(kind.decode(), what.decode())
        # torch's own debug mode misses copies of memory that isn't page-locked
        return int(counts and kind == b"wait" and debug_mode[0] == "error" and b"page-locked" not in what)

    import torch

    device.host_cuda_start(report)
    device.host_cuda_capacity(total)
    record._alive = report, device  # type: ignore[attr-defined]
    index = int(os.environ.get("LOCAL_RANK") or 0)
    _fill_in(torch, device, record, debug_mode, index, total)
    import host_cuda_kernels

    host_cuda_kernels.install(record)
    import host_cuda_ranks

    host_cuda_ranks.install(record)
    _installed.append(record)
    return record


def _fill_in(torch: Any, device: Any, record: Record, debug_mode: list[str], index: int, total: int) -> None:
    """Replace what `torch.cuda` asks a driver for."""
    cuda, base, count = torch.cuda, torch._C, max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), index + 1)
    properties = SimpleNamespace(
        name="NVIDIA H100 in host memory", major=9, minor=0, total_memory=total, multi_processor_count=132,
        uuid=f"GPU-{index}", warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        is_integrated=False, shared_memory_per_block_optin=232448, shared_memory_per_block=49152,
        L2_cache_size=50 * 2**20, gcnArchName="",
    )  # fmt: skip
    priorities: dict[int, int] = {}

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Any:
            if ids:
                return super().__new__(cls, **ids)
            made = super().__new__(cls, device=f"cuda:{index}", priority=priority)
            priorities[made.stream_id] = priority
            return made

        priority = property(lambda self: priorities.get(self.stream_id, 0))
        cuda_stream = property(lambda self: self.stream_id)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, f"cuda:{index}", enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(cuda.current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            super().wait(cuda.current_stream() if stream is None else stream)

    def stream_of(stream_id: int) -> Any:
        return Stream(stream_id=stream_id, device_index=index, device_type=1)

    @contextlib.contextmanager
    def stream(new: Any) -> Iterator[None]:
        with contextlib.nullcontext() if new is None else new:
            yield

    def synchronize(*of: Any) -> None:
        record.note("wait", "synchronize")
        device.host_cuda_synchronize()

    def statistics(*of: Any) -> dict[str, int]:
        sizes = {"current": device.host_cuda_bytes(), "peak": device.host_cuda_peak(0)}
        kinds = ("allocated", "reserved", "active")
        return {f"{kind}_bytes.all.{when}": size for kind in kinds for when, size in sizes.items()}

    def set_debug_mode(mode: Any) -> None:
        debug_mode[0] = {0: "default", 1: "warn", 2: "error"}.get(mode, mode)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: device.host_cuda_pin(address, size) * 0,
        cudaHostUnregister=lambda address: device.host_cuda_pin(address, 0) * 0,
        cudaError=SimpleNamespace(success=0), cudaGetErrorString=str,
    )  # fmt: skip
    nothing, allocated, peak = (
        lambda *_, **__: None,
        lambda *_: device.host_cuda_bytes(),
        lambda *_: device.host_cuda_peak(0),
    )
    here = lambda *_: index  # noqa: E731
    for name, value in {
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_compiled": lambda: True, "init": nothing,
        "_lazy_init": nothing, "_lazy_call": lambda call, **_: call(), "device_count": lambda: count,
        "current_device": here, "set_device": nothing, "_exchange_device": here, "_maybe_exchange_device": here,
        "get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name, "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *_, **__: True, "cudart": lambda: runtime,
        "mem_get_info": lambda *_: (total - allocated(), total), "memory_stats": statistics,
        "memory_allocated": allocated, "memory_reserved": allocated, "max_memory_allocated": peak,
        "max_memory_reserved": peak, "reset_peak_memory_stats": lambda *_: device.host_cuda_peak(1) * 0 or None,
        "empty_cache": nothing, "ipc_collect": nothing, "synchronize": synchronize, "Stream": Stream, "Event": Event,
        "stream": stream, "current_stream": lambda *_: stream_of(device.host_cuda_stream()),
        "default_stream": lambda *_: stream_of(0), "set_stream": lambda new: torch.accelerator.set_stream(new),
        "is_current_stream_capturing": lambda: False, "default_generators": (base.Generator("cuda"),) * count,
        "get_sync_debug_mode": lambda: ["default", "warn", "error"].index(debug_mode[0]),
        "set_sync_debug_mode": set_debug_mode,
    }.items():  # fmt: skip
        value = _distinct(value)
        for module in (cuda, cuda.memory, cuda.random, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    for name in ("getCurrentRawStream", "getDevice", "exchangeDevice", "maybeExchangeDevice"):
        setattr(base, f"_cuda_{name}", _distinct(here))
    base._cuda_getDeviceCount = lambda: count
    new_storage = torch.UntypedStorage.__new__

    def storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new_storage(cls, *args, **kwargs, **({} if device is None else {"device": device}))
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = storage
    resize_storage = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize_storage(self, size)
        device.host_cuda_resize(self._cdata, size)
        return self

    torch.UntypedStorage.resize_ = resize

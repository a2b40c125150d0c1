"""NCCL for the devices of `host_cuda`, carried by gloo through host memory.

As with NCCL, a collective runs after the earlier work of the caller's stream. `Work.wait` makes the stream wait, not
the host.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_map_only


class HostNCCL(dist.ProcessGroupGloo):
    class Options(SimpleNamespace):
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)


REDUCTIONS = {int(op): op for op in dist.ReduceOp.RedOpType.__members__.values()}


def _options(kind: str, **values: Any) -> Any:
    options = getattr(c10d, kind)()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _carry(op: str, backend: Any, a: Any) -> Any:
    """Call gloo's method for an operator of c10d, with the arguments ``a`` in host memory."""
    reduce = {"reduceOp": REDUCTIONS[torch.ops.host_cuda.reduce_op(a["reduce_op"])]} if "reduce_op" in a else {}
    root = {"rootRank": a["root_rank"]} if "root_rank" in a else {}
    if op == "allreduce_":
        return backend.allreduce(a["tensors"], _options("AllreduceOptions", **reduce))
    if op == "broadcast_":
        return backend.broadcast(a["tensors"], _options("BroadcastOptions", **root, rootTensor=a["root_tensor"]))
    if op == "reduce_":
        return backend.reduce(a["tensors"], _options("ReduceOptions", **reduce, **root))
    if op == "allgather_":
        return backend.allgather(a["output_tensors"], a["input_tensors"], _options("AllgatherOptions"))
    if op == "gather_":
        return backend.gather(a["output_tensors"], a["input_tensors"], _options("GatherOptions", **root))
    if op == "_allgather_base_":
        return backend._allgather_base(a["output_tensor"], a["input_tensor"], _options("AllgatherOptions"))
    if op == "_reduce_scatter_base_":
        options = _options("ReduceScatterOptions", **reduce)
        return backend._reduce_scatter_base(a["output_tensor"], a["input_tensor"], options)
    if op == "alltoall_base_":
        sizes = a["output_split_sizes"], a["input_split_sizes"]
        return backend.alltoall_base(a["output"], a["input"], *sizes, _options("AllToAllOptions"))
    if op == "alltoall_":
        return backend.alltoall(a["output_tensors"], a["input_tensors"], _options("AllToAllOptions"))
    if op == "send":
        return backend.send(a["tensors"], a["dst"], a["tag"])
    if op == "recv_":
        return backend.recv(a["tensors"], a["src"], a["tag"])
    assert op == "barrier", op
    return backend.barrier(_options("BarrierOptions"))


OPERATORS = (
    "allreduce_", "broadcast_", "reduce_", "allgather_", "gather_", "_allgather_base_", "_reduce_scatter_base_",
    "alltoall_base_", "alltoall_", "send", "recv_", "barrier",
)  # fmt: skip


class Collective:
    """Kernel of an operator of c10d for the device's tensors."""

    def __init__(self, op: str, record: Any) -> None:
        self.op, self.schema = op, getattr(torch.ops.c10d, op).default._schema
        self._record = record

    def __call__(self, *args: Any) -> Any:
        named = dict(zip((argument.name for argument in self.schema.arguments), args, strict=False))
        backend = dist.ProcessGroup.unbox(named["process_group"])._get_backend(torch.device("cuda"))
        present, stream = torch.cuda.current_stream(), _stream()
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            written: list[tuple[torch.Tensor, torch.Tensor]] = []

            def to_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
                if not tensor.is_cuda:
                    return tensor
                tensor.record_stream(stream)
                host = self._record.as_kernel(tensor.cpu, "collective")()
                if not name.startswith("input") and self.op != "send":
                    written.append((tensor, host))
                return host

            on_host = {
                name: tree_map_only(torch.Tensor, functools.partial(to_host, name), value)
                for name, value in named.items()
            }
            _carry(self.op, backend, on_host).wait()
            for tensor, host in written:
                self._record.as_kernel(tensor.copy_, "collective")(host)
            done = torch.futures.Future(devices=[torch.device("cuda", torch.cuda.current_device())])
            done.set_result([tensor for tensor, _ in written])
        work = _create_work_from_future(done)
        if not named.get("async_op", True):
            work.wait()
        boxed = work.boxed()
        if len(self.schema.returns) == 1:
            return boxed
        first = "tensors" if "tensors" in named else next(name for name in named if name.startswith("output"))
        return named[first], boxed


_streams: list[Any] = []


def _stream() -> Any:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


def install(record: Any) -> None:
    HostNCCL.__module__ = c10d.__name__
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = HostNCCL  # type: ignore[misc]
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 28, 0)
    kernels = torch.library.Library("c10d", "IMPL", "CUDA")
    for op in OPERATORS:
        kernels.impl(op, Collective(op, record), allow_override=True)
    record._collective_library = kernels

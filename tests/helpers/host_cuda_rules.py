"""Shows each rule of the device of `host_cuda` once: errors, counts, races."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import host_cuda

record = host_cuda.install()

import torch  # noqa: E402

GPU = torch.device("cuda")


def refuses(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except (RuntimeError, TypeError, AssertionError) as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"not refused: {words}")


def raced(words: str) -> None:
    """Expect one kind of race since the last call, or none."""
    torch.cuda.synchronize()
    assert all(words in what for what, _ in record.races) and bool(words) == bool(record.races), (words, record.races)
    record.clear()


def devices(one: torch.Tensor, host: torch.Tensor) -> None:
    square, index = one.view(8, 8), torch.tensor([1])
    for call in (
        lambda: torch.equal(one, host), lambda: one + host, lambda: square @ host.view(8, 8), lambda: host.add_(one),
        lambda: one.index_select(0, index), lambda: torch.cat([one, host]), lambda: host[index.to(GPU)],
        lambda: torch.nn.functional.embedding(index, square), lambda: one.index_put_((index,), host[:1]),
        lambda: torch.tensor(0.0).add_(one.sum()),
    ):  # fmt: skip
        refuses(call, "same device")
    refuses(lambda: one.numpy(), "numpy")
    refuses(lambda: torch.rand(2, device=GPU, generator=torch.Generator()), "generator")
    refuses(lambda: torch.rand(2, generator=torch.Generator(GPU)), "same device")
    refuses(lambda: torch.empty(2, device="cuda:1"), "cuda:1")
    refuses(lambda: torch.empty(2**40, device=GPU), "out of memory")
    assert (one + torch.tensor(1.0)).is_cuda and one[index].is_cuda  # as CUDA allows
    assert torch.empty(4, device=GPU).isnan().all()


def waits(one: torch.Tensor, host: torch.Tensor) -> None:
    record.clear()
    for call in (lambda: one.sum().item(), one.cpu, one.nonzero, lambda: host.to(GPU, non_blocking=True)):
        call()
    assert sum(record.waits.values()) == 4, record.waits
    record.clear()
    host.pin_memory().to(GPU, non_blocking=True)
    assert not record.waits
    torch.cuda.set_sync_debug_mode("error")
    refuses(lambda: one.sum().item(), "synchronizing")
    torch.cuda.set_sync_debug_mode("default")


def copies(one: torch.Tensor) -> None:
    pinned, event = torch.empty(64, pin_memory=True), torch.cuda.Event()
    pinned.copy_(one, non_blocking=True)
    assert (pinned < -1e30).all(), "until the host has waited it reads garbage"
    event.record()
    event.synchronize()
    assert torch.equal(pinned, one.cpu())
    pinned.copy_(one, non_blocking=True)
    again = torch.empty_like(one).copy_(pinned, non_blocking=True)  # in the order of one stream
    assert torch.equal(again, one)
    raced("")
    again.copy_(pinned, non_blocking=True)
    pinned.zero_()
    raced("host wrote")


def streams(one: torch.Tensor) -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        one.mul_(2)
    one.add_(1)
    raced("without waiting")
    with torch.cuda.stream(side):
        one.mul_(2)
        event.record()
    event.wait()
    one.add_(1)
    raced("")
    for recorded in (False, True):
        part = torch.ones(4096, device=GPU)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            part.mul_(2)
        if recorded:
            part.record_stream(side)
        del part
        torch.ones(4096, device=GPU)
        raced("" if recorded else "still uses")


def memory() -> None:
    before = torch.cuda.memory_allocated()
    large = torch.ones(2**20, device=GPU)
    assert torch.cuda.memory_allocated() - before == large.nbytes == 2**22
    address = large.data_ptr()
    del large
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + 2**22
    import ctypes

    assert ctypes.string_at(address, 4) == b"\xfb" * 4, "a stale pointer reads garbage"


def main() -> None:
    one, host = torch.randn(64, device=GPU), torch.randn(64)
    devices(one, host)
    waits(one, host)
    copies(one)
    streams(one)
    memory()
    print(json.dumps({"rules": "hold"}))


if __name__ == "__main__":
    main()

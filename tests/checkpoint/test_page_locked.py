"""Copies of a GPU's tensors to page-locked memory are queued, and are complete before a reader sees them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colograd.checkpoint.writing import HostFiles, write_bytes
from colograd.runtime import page_locked
from colograd.weights import state_dict_on_host


class OnGPU(torch.Tensor):
    """A CPU tensor with ``is_cuda`` set. A queued copy is made when the GPU is synchronized."""

    is_cuda = True
    queue: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            cls.queue.append((args[0], args[1].as_subclass(torch.Tensor)))
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result.as_subclass(cls) if func is torch.Tensor.detach else result


def mapped() -> Iterator[tuple[int, ...]]:
    """Yield (first address, end) of each memory mapping of the process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        yield tuple(int(end, 16) for end in line.split()[0].split("-"))


class GPU:
    """Fake of the CUDA calls that lock, unlock and copy pages."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.registered: list[int] = []  # lengths, of all calls
        self.locked: set[int] = set()  # addresses, at present
        self.waits: list[int] = []  # copies that each waited for
        self.errors = 0  # that the next kernel would report

    def register(self, address: int, nbytes: int, flags: int) -> int:
        assert address % 4096 == nbytes % 4096 == 0 and address not in self.locked
        self.registered.append(nbytes)
        if self.refuses:
            self.errors += 1
            return 2
        self.locked.add(address)
        return 0

    def unregister(self, address: int) -> int:
        assert any(first <= address < end for first, end in mapped()), "CUDA would unlock somebody else's pages"
        self.locked.remove(address)
        return 0

    def forget_error(self, device: torch.device) -> None:
        self.errors -= 1

    def synchronize(self) -> None:
        self.waits.append(len(OnGPU.queue))
        for place, value in OnGPU.queue:
            place.copy_(value)
        OnGPU.queue.clear()


@pytest.fixture(params=[False, True], ids=["locks", "refuses"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GPU:
    gpu = GPU(refuses=request.param)
    cudart = SimpleNamespace(cudaHostRegister=gpu.register, cudaHostUnregister=gpu.unregister)
    monkeypatch.setattr(OnGPU, "queue", [], raising=False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "ones", lambda size, device: gpu.forget_error(device))
    return gpu


def values(seed: int, *names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(50, 30, generator=generator) for name in names}


def on_gpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().as_subclass(OnGPU) for name, tensor in tensors.items()}


def test_copies_are_queued_with_one_wait(gpu: GPU, tmp_path: Path) -> None:
    images = HostFiles(torch.device("cuda", 0))
    for seed in (1, 2):
        wanted = {"optimizer": values(seed, "a", "b", "c"), "reference": values(-seed, "d", "e")}
        for name, tensors in wanted.items():
            images.put(on_gpu(tensors) | {"step": torch.tensor(float(seed))}, tmp_path / name)
        assert gpu.waits == [5] * (seed - 1), "nobody waits for a file"
        for path, image in images.take().items():
            write_bytes(image.bytes, path)
            read = load_file(path)
            assert float(read.pop("step")) == seed
            assert all(torch.equal(read[name], value) for name, value in wanted[path.name].items())
            assert len(read) == len(wanted[path.name])
        assert gpu.waits == [5] * seed
    assert gpu.registered == [-(-image.size // 4096) * 4096 for image in images.kept.values()]
    assert len(gpu.locked) == (0 if gpu.refuses else 2) and gpu.errors == 0
    del images, image
    assert not gpu.locked, "what is freed is locked no longer"


def test_weights_are_there_when_transformers_gets_them(gpu: GPU, tmp_path: Path) -> None:
    images, path = HostFiles(torch.device("cuda", 0)), tmp_path / "model.safetensors"
    for seed in (1, 2):
        weights = values(seed, "a", "b", "c")
        model: Any = SimpleNamespace(state_dict=lambda weights=weights: on_gpu(weights))
        host = state_dict_on_host(model, images.places(path.name))
        assert all(torch.equal(host[name], value) for name, value in weights.items())
        images.put(host, path)
        assert list(images.take()) == [path]
    assert gpu.waits == [3], "the first time there are no buffers to copy into"
    assert len(gpu.registered) == 1


def test_pages_stay_locked_while_the_storage_exists(gpu: GPU) -> None:
    tensor = page_locked.host_empty(torch.Size((3, 1025)), torch.bfloat16, torch.device("cuda", 0))
    address = tensor.data_ptr()
    assert gpu.registered == [2 * 4096], "whole pages, and not the next power of two"
    view, tensor = tensor[1:].detach(), torch.empty(0)
    assert gpu.locked == (set() if gpu.refuses else {address})
    view.fill_(1)
    del view
    assert not gpu.locked and not tensor.numel()


def test_a_tensors_pages_may_be_large(gpu: GPU) -> None:
    """The memory is private, large pages are requested, and a forked process doesn't get it."""
    tensor = page_locked.host_empty(torch.Size((2**22,)), torch.uint8, torch.device("cuda", 0))
    areas = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    bounds = (tuple(int(end, 16) for end in area.split()[0].split("-")) for area in areas)
    (area,) = (area for area, (a, b) in zip(areas, bounds, strict=True) if a <= tensor.data_ptr() < b)
    assert area.split()[1] == "rw-p"
    assert {"hg", "dc"} <= set(area.partition("VmFlags:")[2].split())


def test_nothing_is_asked_of_cuda_on_a_cpu(gpu: GPU, tmp_path: Path) -> None:
    for device in (None, torch.device("cpu")):
        images = HostFiles(device)
        for seed in (1, 2):
            model: Any = SimpleNamespace(state_dict=lambda seed=seed: values(seed, "a", "b"))
            images.put(state_dict_on_host(model, images.places("file")), tmp_path / "file")
            images.take()
    assert not gpu.registered and not gpu.waits


def test_reserved_memory_is_locked_in_the_background(gpu: GPU) -> None:
    device = torch.device("cuda", 0)
    page_locked.reserve([4096, 8192, 4096], device)
    tensors = [page_locked.host_empty(torch.Size((size,)), torch.uint8, device) for size in (8192, 4096, 4096)]
    assert gpu.registered == [4096, 8192, 4096], "in the order of the reservation, and nothing more"
    if not gpu.refuses:
        assert gpu.locked == {tensor.data_ptr() for tensor in tensors}
    page_locked.host_empty(torch.Size((4096,)), torch.uint8, device)
    assert len(gpu.registered) == 4, "nothing is reserved any more"
    page_locked.reserve([4096], torch.device("cpu"))
    assert len(gpu.registered) == 4

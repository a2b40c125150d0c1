"""A state that passes through the device: the same bits, no copy that overtakes another, two buffers and no more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colograd import GRPOTrainer
from colograd.config import GRPOConfig
from colograd.memory import state_stream
from colograd.memory.state_stream import ALIGNED, BUFFERS, StateStream
from colograd.training import adamw_split
from colograd.training.adamw_split import AdamWSplit

SHAPES = ((17, 5), (33,), (), (40, 3))


def parameters(transposed: bool) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = [0.05 * torch.randn(shape, generator=generator) for shape in SHAPES]
    made = [torch.nn.Parameter(value.bfloat16()) for value in values]
    made += [torch.nn.Parameter(values[0].clone())]  # float32
    if transposed:
        made += [torch.nn.Parameter(values[3].bfloat16().t())]
    adamw_split.accumulate_in_float32(made)
    return made


def steps(optimizer: AdamWSplit, own: list[torch.nn.Parameter], numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(100 + number)
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_streamed_state_leaves_the_same_bits_and_goes_on_either_way(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of seven elements, a transposed parameter that can't be cut, one without dimensions; saved and loaded
    after three steps from and to each way."""
    monkeypatch.setattr(adamw_split, "ELEMENTS", 7)
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "compiled": compiled}
    plain, expected = parameters(True), {}
    optimizer = AdamWSplit(plain, **settings)
    steps(optimizer, plain, range(6))
    expected = [value for p in plain for value in (p.detach(), *optimizer.state[p].values())]
    for first, second in ((True, True), (True, False), (False, True)):
        own = parameters(True)
        begun = AdamWSplit(own, **settings, streamed=first)
        steps(begun, own, range(3))
        resumed = AdamWSplit(own, **settings, streamed=second)
        resumed.load_state_dict(begun.state_dict())
        steps(resumed, own, range(3, 6))
        found = [value for p in own for value in (p.detach(), *resumed.state[p].values())]
        assert len(found) == len(expected) > 20
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


# -- the order of copies


class Races(TorchDispatchMode):
    """Streams that know what they have waited for. An operation whose memory another stream has used, by one that its
    own stream hasn't waited for, is a race."""

    def __init__(self) -> None:
        super().__init__()
        self.present = self.computing = SimpleNamespace(known=set())
        self.used: list[tuple[int, int, int, Any]] = []  # memory's first and last byte, operation, its stream
        self.races: list[str] = []
        self.host: set[int] = set()  # operations that the host has waited for
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
        for tensor in tree_leaves([args, kwargs, result]):
            if isinstance(tensor, torch.Tensor) and tensor.nbytes:
                first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                for start, stop, operation, stream in self.used:
                    apart = stop <= first or last <= start or stream is self.present
                    if not apart and operation not in self.present.known:
                        self.races.append(f"{func} overtakes operation {operation}")
                self.used.append((first, last, self.count, self.present))
        self.present.known.add(self.count)
        return result

    # what `torch.cuda` has

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


def test_no_copy_overtakes_another_and_the_host_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_split, "ELEMENTS", 16)
    own = parameters(False)
    optimizer = AdamWSplit(own, lr=1e-3, compiled=False, streamed=True)
    steps(optimizer, own, range(1))
    races = Races()
    monkeypatch.setattr(torch, "get_device_module", lambda device: races)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    with races:
        optimizer.step()
    assert not races.races, races.races[:3]
    assert len(races.copied) > 60 and races.copied <= races.host
    # 16 elements: two moments of 64 bytes and a remainder of 32, each in a block of its own
    assert sorted(filter(None, races.allocated)) == [3 * ALIGNED] * BUFFERS

    monkeypatch.setattr(races, "Event", lambda: SimpleNamespace(record=id, wait=id, synchronize=lambda: None))
    with races:
        optimizer.step()
    assert races.races, "without events there are some"


def test_a_larger_job_gets_a_larger_buffer() -> None:
    host = [torch.arange(n, dtype=torch.float32) for n in (5, 500, 6, 7000)]

    def double(tensors: Any) -> None:
        tensors[0].mul_(2)

    StateStream(torch.device("cpu")).run([([tensor], double) for tensor in host])
    assert all(torch.equal(tensor, 2 * torch.arange(len(tensor), dtype=torch.float32)) for tensor in host)


# -- in a run


@pytest.mark.engine
def test_a_run_whose_optimizer_is_streamed_ends_with_the_same_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is offloaded, so the run is told that it isn't on one where it asks for that."""

    def train(streamed: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(GRPOConfig, "streams_optimizer", property(lambda self: streamed))
        config = tiny.config(
            tmp_path / str(streamed), max_steps=3, optim="adamw_split", offload_optimizer="stream",
            model_init_kwargs={"dtype": "bfloat16"}, learning_rate=1e-3, save_strategy="no",
        )  # fmt: skip
        trainer = GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts(12))
        try:
            trainer.train()
            assert trainer.optimizer.optimizer.streamed == streamed
            return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        finally:
            trainer.close()

    monkeypatch.setattr(adamw_split, "ELEMENTS", 1000)
    plain, streamed = train(False), train(True)
    assert all(torch.equal(plain[name], streamed[name]) for name in plain)


def test_what_passes_through_is_counted() -> None:
    most = BUFFERS * state_stream.ELEMENTS * 10
    assert state_stream.device_bytes(100) == 100 and state_stream.device_bytes(10**12) == most < 2**28

"""A state that passes through the device: the same bits, no copy that overtakes another, two buffers and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from races import Races

from colograd.extensions.offload import adamw, host_stream
from colograd.extensions.offload.adamw import HostAdamW
from colograd.extensions.offload.host_stream import ALIGNED, BUFFERS, HostStream, Job
from colograd.parallel import watchdog
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
    monkeypatch.setattr(adamw, "ELEMENTS", 7)
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "compiled": compiled}
    plain, expected = parameters(True), {}
    optimizer = AdamWSplit(plain, **settings)
    steps(optimizer, plain, range(6))
    expected = [value for p in plain for value in (p.detach(), *optimizer.state[p].values())]
    for first, second in ((True, True), (True, False), (False, True)):
        own = parameters(True)
        begun = HostAdamW(own, **settings, streamed=first)
        steps(begun, own, range(3))
        resumed = HostAdamW(own, **settings, streamed=second)
        resumed.load_state_dict(begun.state_dict())
        steps(resumed, own, range(3, 6))
        found = [value for p in own for value in (p.detach(), *resumed.state[p].values())]
        assert len(found) == len(expected) > 20
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


# -- the order of copies


def test_no_copy_overtakes_another_and_the_host_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "ELEMENTS", 16)
    own = parameters(False)
    optimizer = HostAdamW(own, lr=1e-3, compiled=False, streamed=True)
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

    HostStream(torch.device("cpu")).run(Job(double, [tensor]) for tensor in host)
    assert all(torch.equal(tensor, 2 * torch.arange(len(tensor), dtype=torch.float32)) for tensor in host)


def test_what_passes_through_is_counted() -> None:
    most = BUFFERS * host_stream.ELEMENTS * 10
    assert host_stream.device_bytes(100) == 100 and host_stream.device_bytes(10**12) == most < 2**28


def test_a_streamed_state_s_pages_are_progress() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = HostAdamW(parameters, streamed=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = watchdog._count
    optimizer.step()
    assert watchdog._count - before >= 3 * len(parameters)

"""The optimizer's state goes to the host and comes back, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch

from colograd.extensions.offload.adamw import OptimizerOffload
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32


def trained(steps: int = 2, cls: Any = AdamWSplit) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(torch.bfloat16)
    accumulate_in_float32(model.parameters())
    optimizer = cls(model.parameters(), lr=1e-2)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_state_comes_back_bit_for_bit_and_scalars_stay() -> None:
    _, optimizer = trained()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    scalars = {id(value): value.data_ptr() for value in state if value.dim() == 0}
    before, places = copy.deepcopy(state), {id(value): value.data_ptr() for value in state if value.dim()}
    offload = OptimizerOffload()
    moved = offload.to_host(optimizer)
    assert moved == sum(value.nbytes for value in state if value.dim()) == (8 * 4 + 4) * 10
    assert all(value.data_ptr() != places[id(value)] for value in state if value.dim()), "it left"
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True)), "and may be read where it is"
    assert offload.to_device() == moved
    assert [id(v) for entry in optimizer.state.values() for v in entry.values()] == [id(v) for v in state]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(state, before, strict=True))
    assert all(value.data_ptr() == scalars[id(value)] for value in state if value.dim() == 0)


def test_training_goes_on_as_if_nothing_had_moved() -> None:
    (kept, optimizer), (moved, other) = trained(), trained()
    offload = OptimizerOffload()
    for _ in range(3):
        offload.to_host(other)
        assert offload.to_host(other) == 0, "it is there already"
        offload.to_device()
        step(kept, optimizer)
        step(moved, other)
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), moved.parameters(), strict=True))


def test_the_host_s_copies_are_made_once() -> None:
    _, optimizer = trained()
    offload, places = OptimizerOffload(), []
    for _ in range(2):
        offload.to_host(optimizer)
        places.append([v.data_ptr() for entry in optimizer.state.values() for v in entry.values() if v.dim()])
        offload.to_device()
    assert places[0] == places[1]


def test_an_optimizer_without_state_moves_nothing() -> None:
    _, optimizer = trained(steps=0)
    offload = OptimizerOffload()
    assert offload.to_host(optimizer) == 0 and offload.to_device() == 0

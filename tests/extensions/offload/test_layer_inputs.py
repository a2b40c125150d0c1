"""Inputs of layers in host memory: the bits of checkpoints that keep them on the device, places that are used again,
copies that overtake none."""

from __future__ import annotations

import contextlib
import copy
import types
from typing import Any

import pytest
import row_cases
import torch
from lora_cases import doing_something
from peft import LoraConfig
from races import Races
from torch.utils.checkpoint import checkpoint

from colograd.extensions.offload import layer_inputs
from colograd.extensions.offload.layer_inputs import KEPT, LayerInputs, inputs_on_host
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.lora import unwrap, wrap
from colograd.policy.packing import pack
from colograd.policy.row_proof import choose_rows

CPU = torch.device("cpu")
FAMILIES = {name: build for name, build in vars(row_cases).items() if isinstance(build, dict)}
BUILD = {name: build for group in FAMILIES.values() for name, build in group.items() if callable(build)}


def gradients(kind: str, packed: bool, on_host: bool) -> list[torch.Tensor]:
    """Gradients of two passes over rows of different lengths. In one pass all rows' graphs exist at once."""
    model = row_cases.make(BUILD[kind.removesuffix(" with an adapter")])
    if kind.endswith("adapter"):
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = doing_something(wrap(model, config, seed=0)).train()
    if packed:
        assert choose_rows(model) == ""
    with inputs_on_host(unwrap(model), LayerInputs(CPU)) if on_host else contextlib.nullcontext():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows = pack(row_cases.make_groups(), 40, False, CPU, share_prompts=packed)
    losses = [policy_logprobs(model, row, 1.0)[0].sum() for row in rows]
    assert len(losses) > 1
    torch.stack(losses).sum().backward()
    for row in rows:
        policy_logprobs(model, row, 1.0)[0].sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["granite", "qwen3_moe", "qwen3_5", "granite with an adapter"])
def test_gradients_have_the_same_bits(kind: str, packed: bool) -> None:
    expected, found = (gradients(kind, packed, on_host) for on_host in (False, True))
    assert len(expected) > 10 and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def a_pass(inputs: LayerInputs, lengths: int, weights: list[torch.Tensor]) -> torch.Tensor:
    hidden = torch.ones(lengths, 8)
    for weight in weights:
        hidden = inputs.checkpoint(lambda x, w=weight: torch.tanh(x @ w), hidden, use_reentrant=False)
    return hidden.sum()


def test_copies_overtake_none_and_places_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths follow one another. One row's graph is dropped without a backward."""
    races, taken = Races(), []
    made = layer_inputs.host_empty
    monkeypatch.setattr(layer_inputs, "host_empty", lambda shape, *of: taken.append(shape.numel()) or made(shape, *of))
    monkeypatch.setattr(torch, "get_device_module", lambda device: races)
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, generator=draw, requires_grad=True) for _ in range(6)]
    inputs = LayerInputs(CPU)
    for length in (50, 90, 20, 70):
        with races:
            loss = a_pass(inputs, length, weights)
            if length == 20:
                del loss
                continue
            loss.backward()
            del loss
        found = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        a_plain = torch.ones(length, 8)
        for weight in weights:
            a_plain = checkpoint(lambda x, w=weight: torch.tanh(x @ w), a_plain, use_reentrant=False)
        a_plain.sum().backward()
        assert all(torch.equal(a, weight.grad) for a, weight in zip(found, weights, strict=True))
        for weight in weights:
            weight.grad = None
    assert not races.races, races.races[:3]
    assert taken == [50 * 32] * 6 + [90 * 32] * 6, "the longest row's places are everybody's"
    monkeypatch.setattr(races, "Event", lambda: Event())
    with races:
        a_pass(inputs, 90, weights).backward()
    assert races.races, "without events there are some"


class Event:
    def record(self, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


def test_a_few_inputs_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers' inputs stay on the device, and only a few others are there in forward and backward."""
    copies: list[Any] = []
    usual = LayerInputs.copy
    monkeypatch.setattr(LayerInputs, "copy", lambda *given: copies.append(given[3]) or usual(*given))
    inputs, weights = LayerInputs(CPU), [torch.eye(8, requires_grad=True) for _ in range(6)]
    loss = a_pass(inputs, 5, weights)
    assert len(inputs._on_way) == KEPT
    loss.backward()
    assert sum(stream is inputs.filling for stream in copies) == 6 - KEPT


def test_a_model_can_be_copied_and_keeps_no_host_memory_afterwards() -> None:
    model = row_cases.make(BUILD["llama"])
    with inputs_on_host(model, LayerInputs(CPU)):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        copy.deepcopy(model)
    left = [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()]
    assert {function.func for function in left if function is not None} == {checkpoint}


def test_a_host_without_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    none_left = types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(available=100))
    monkeypatch.setattr(layer_inputs, "psutil", none_left)
    with pytest.raises(torch.OutOfMemoryError, match="no host memory for the 101 bytes of a layer's input"):
        LayerInputs(CPU).take_place(101)

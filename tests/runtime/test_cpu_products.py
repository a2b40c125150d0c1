"""bfloat16 products on a CPU that has none: float32's, rounded once."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F

from colograd.policy.head import product_dtype
from colograd.runtime import cpu_products


@pytest.fixture(autouse=True)
def without_bfloat16(monkeypatch):
    monkeypatch.setattr(cpu_products, "wanted", lambda: True)
    monkeypatch.setattr(cpu_products, "CAST_ELEMENTS", 64)  # some parts, the last one smaller


def given(dtype=torch.bfloat16):
    torch.manual_seed(0)
    layer = torch.nn.Linear(12, 23, dtype=dtype)
    return layer, torch.randn(2, 5, 12, dtype=dtype, requires_grad=True), torch.randn(2, 5, 23, dtype=dtype)


def exact(layer, x, gradient):
    """The product and the gradients of input, weight and bias, in float32 and rounded."""
    inputs = [tensor.detach().float().requires_grad_() for tensor in (x, layer.weight, layer.bias)]
    product = F.linear(*inputs)
    product.backward(gradient.float())
    return [tensor.to(torch.bfloat16) for tensor in (product, *(each.grad for each in inputs))]


def check(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)  # a sum of another order may round to the next


def test_products_and_gradients_are_float32_s_rounded_once():
    layer, x, gradient = given()
    wanted = exact(layer, x, gradient)
    cpu_products.take_over(torch.nn.ModuleList([layer]))
    product = layer(x)
    product.backward(gradient)
    check((product, x.grad, layer.weight.grad, layer.bias.grad), wanted)


def test_under_autocast_factors_are_rounded_and_gradients_are_float32():
    layer, x, gradient = given(torch.float32)
    rounded = copy.deepcopy(layer).bfloat16()
    wanted = exact(rounded, x.bfloat16(), gradient.bfloat16())
    cpu_products.take_over(layer)
    with torch.autocast("cpu", torch.bfloat16):
        product = layer(x)
    product.backward(gradient.bfloat16())
    assert product.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    check((product, *(each.grad.bfloat16() for each in (x, layer.weight, layer.bias))), wanted)


def test_copied_layers_multiply_by_their_own_weights():
    """Layers lose the replaced forward in give_back."""
    layer, x, _ = given()
    cpu_products.take_over(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(other(x), other.bias.expand_as(other(x))) and not torch.equal(layer(x), other(x))
    cpu_products.give_back(layer)
    assert "forward" not in layer.__dict__


def test_a_head_multiplies_in_float32(monkeypatch):
    weight, cpu = torch.empty(3, 2, dtype=torch.bfloat16), torch.device("cpu")
    assert product_dtype(weight, cpu, wide=False) == torch.float32
    monkeypatch.setattr(cpu_products, "wanted", lambda: False)
    assert product_dtype(weight, cpu, wide=False) == torch.bfloat16


def test_constant_weights_are_cast_once():
    layer, x, _ = given()
    x, rows = x.detach().flatten(0, 1), torch.randn(9, 12, dtype=torch.bfloat16)
    plain = [cpu_products.linear(each, layer.weight, layer.bias) for each in (x, rows)]
    with torch.no_grad(), cpu_products.constant_weights():
        kept = [cpu_products.linear(each, layer.weight, layer.bias) for each in (x, rows)]
        assert [copy.dtype for _, copy in cpu_products._copies.values()] == [torch.float32]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, plain, strict=True))
    with torch.no_grad():
        layer.weight.mul_(2)
        with cpu_products.constant_weights():
            changed = cpu_products.linear(x, layer.weight, layer.bias)
    assert torch.equal(changed, cpu_products.linear(x, layer.weight, layer.bias)) and not torch.equal(changed, kept[0])


def test_copies_leave_most_memory_free(monkeypatch):
    layer, x, _ = given()
    memory = types.SimpleNamespace(available=4 * 4 * layer.weight.numel() - 1)
    monkeypatch.setattr(cpu_products.psutil, "virtual_memory", lambda: memory)
    with torch.no_grad(), cpu_products.constant_weights():
        cpu_products.linear(x.detach(), layer.weight, layer.bias)
        assert not cpu_products._copies


def test_temporary_weights_are_never_kept():
    """Dequantised weights of one layer after the other may have the same address."""
    _, x, _ = given()
    x, place = x.detach(), torch.empty(23, 12, dtype=torch.bfloat16)
    with torch.no_grad(), cpu_products.constant_weights():
        for factor in range(1, 5):
            product = cpu_products.linear(x, place.fill_(factor))
            torch.testing.assert_close(product, (factor * x.float().sum(-1, keepdim=True)).expand(2, 5, 23).bfloat16())

"""The policy's decoder layers: find them, turn dropout off, and compile them for packed rows (`torch_compile`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import AttentionInterface

from ..config import GRPOConfig
from . import attention

# Limit of compiled graphs per function. Training, evaluation, kinds of layers and adapters need graphs of their own.
MOST_GRAPHS = 64


class NotCompiled(ValueError):
    """Raised when torch can't compile a decoder layer."""


def check_compiled(config: GRPOConfig, why_padded: str) -> None:
    if config.torch_compile and why_padded:
        raise ValueError(
            f"torch_compile is true, but compiled layers need packed rows, and this model's rows are padded "
            f"({why_padded}): set torch_compile to false."
        )


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules of the classes that the model's `_no_split_modules` names.

    If the model has no such modules: return the members of its longest `ModuleList`.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if found:
        inside = {child for module in found for child in module.modules() if child is not module}
        return [module for module in found if module not in inside]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def tells_routing(model: Any) -> bool:
    """Return whether the model's forward can return the router logits of a mixture of experts."""
    return hasattr(model.config.get_text_config(), "output_router_logits") and "router_logits" in (
        getattr(model, "_can_record_outputs", None) or {}
    )


def compile_layers(model: torch.nn.Module, backend: str = "inductor", mode: str | None = None) -> None:
    """Replace the forward of each decoder layer, so that torch compiles the layer at its first packed row."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    # Attention isn't compiled. If torch traced attention, each row's layout would make a new graph.
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for layer in decoder_layers(model):
        own = layer.forward.__func__
        # A bound method, because deepcopy of a layer binds the method's copy to the layer's copy.
        layer.forward = MethodType(functools.partial(_forward, own, _compiled(own, backend, mode)), layer)


@contextmanager
def as_it_trains(model: torch.nn.Module) -> Iterator[None]:
    """Turn on training mode and gradients, if the layers are compiled and the model has no dropout.

    A check of the model in this context compiles the graphs that training needs. In evaluation mode, the check would
    compile other graphs. No parameter may have a gradient yet, because torch can't trace a gradient that isn't in its
    parameter's dtype.
    """
    rates = (getattr(m, "p" if isinstance(m, torch.nn.Dropout) else "attention_dropout", 0) for m in model.modules())
    if not any(map(is_compiled, decoder_layers(model))) or any(rates):
        yield
        return
    was_training = model.training
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        model.train(was_training)


def forget_compiled(model: torch.nn.Module) -> None:
    for layer in filter(is_compiled, decoder_layers(model)):
        del layer.forward


def is_compiled(layer: torch.nn.Module) -> bool:
    own = getattr(vars(layer).get("forward"), "__func__", None)
    return isinstance(own, functools.partial) and own.func is _forward


@functools.cache
def _compiled(own: Callable[..., Any], backend: str, mode: str | None) -> Callable[..., Any]:
    if backend != "inductor":
        return torch.compile(own, dynamic=True, backend=backend, mode=mode)
    # With inductor's `mix_order_reduction` a GPU would need further graphs for rows of 4096 tokens or more.
    options = torch._inductor.list_mode_options(mode or "default") | {"triton.mix_order_reduction": False}
    return torch.compile(own, dynamic=True, options=options)


def _forward(
    own: Callable[..., Any], compiled: Callable[..., Any], layer: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("layout") is None:
        return own(layer, *args, **kwargs)
    try:
        return compiled(layer, *args, **kwargs)
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])  # The first line may only name the backend.
        raise NotCompiled(
            f"torch_compile is true, but torch can't compile a {type(layer).__name__} ({reason}). Torch needs "
            "a C++ compiler on a CPU (g++, or the compiler in CXX), and Triton and a C compiler on a GPU: install "
            "missing programs, or set torch_compile to false."
        ) from error


def largest_dropout(model: torch.nn.Module) -> float:
    """Return the largest dropout probability in the model. `lora_dropout` doesn't count."""
    return max((float(getattr(owner, name)) for owner, name in _dropouts(model)), default=0.0)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set all dropout probabilities of the model to 0, except `lora_dropout`."""
    for owner, name in _dropouts(model):
        setattr(owner, name, 0.0)


def _dropouts(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            if "lora_dropout" not in path:
                yield module, "p"
            continue
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                yield module, name

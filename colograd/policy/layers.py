"""The policy's layers: find them, turn dropout off, and compile them for packed rows (``torch_compile``).

Norms, rotary embedding, activation and residuals of a layer become a few fused kernels for rows of any length. All
layers share them. Attention runs uncompiled between them. A call without a layout runs the uncompiled code.
"""

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

# Maximum number of graphs of one layer's code: training, evaluation and no gradients, for each kind of layer, with and
# without an adapter.
MOST_GRAPHS = 64


class NotCompiled(ValueError):
    """Failure to compile a layer."""


def check_compiled(config: GRPOConfig, why_padded: str) -> None:
    """Raise a ValueError if layers are to be compiled, but rows are padded (``why_padded``)."""
    if config.torch_compile and why_padded:
        raise ValueError(
            f"torch_compile is true, but compiled layers take packed rows, and this model's are padded ({why_padded}): "
            "set it to false."
        )


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that the model names as indivisible, or else the members of its longest list of modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if found:
        inside = {child for module in found for child in module.modules() if child is not module}
        return [module for module in found if module not in inside]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def tells_routing(model: Any) -> bool:
    """Return whether the model can return its routers' logits."""
    return hasattr(model.config.get_text_config(), "output_router_logits") and "router_logits" in (
        getattr(model, "_can_record_outputs", None) or {}
    )


def compile_layers(model: torch.nn.Module, backend: str = "inductor", mode: str | None = None) -> None:
    """Run packed rows through layers that the first row of each kind compiles, also in copies of the model.

    Parameters keep their names. ``backend`` and ``mode`` are `torch.compile`'s.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    # Attention isn't traced, because each layout would make another graph.
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for layer in decoder_layers(model):
        own = layer.forward.__func__
        # A bound method: a copy of the layer gets one that is bound to it.
        layer.forward = MethodType(functools.partial(_forward, own, _compiled(own, backend=backend, mode=mode)), layer)


@contextmanager
def as_it_trains(model: torch.nn.Module) -> Iterator[None]:
    """Run the body in training mode if layers are compiled and have no dropout, because that mode has its own graphs.

    No gradient may exist yet: torch can't trace a parameter with a gradient of another dtype.
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


# dynamic=True: the first row already makes a graph for rows of any length.
_compiled = functools.cache(functools.partial(torch.compile, dynamic=True))


def _forward(
    own: Callable[..., Any], compiled: Callable[..., Any], layer: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Run a compiled layer on a packed row, and the layer's own forward on other inputs."""
    if kwargs.get("layout") is None:
        return own(layer, *args, **kwargs)
    try:
        return compiled(layer, *args, **kwargs)
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])  # a backend's message begins with its name
        raise NotCompiled(
            f"torch_compile is true, but torch can't compile a {type(layer).__name__} ({reason}): on a CPU it needs a "
            "C++ compiler (g++, or the one that CXX names), on a GPU Triton and a C compiler. Or set it to false."
        ) from error


def largest_dropout(model: torch.nn.Module) -> float:
    """Return the largest dropout probability, except an adapter's own (`lora_dropout`); 0: no dropout."""
    return max((float(getattr(owner, name)) for owner, name in _dropouts(model)), default=0.0)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every probability to 0, also the ones that modules pass to attention functions."""
    for owner, name in _dropouts(model):
        setattr(owner, name, 0.0)


def _dropouts(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield each probability's module and attribute name."""
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            if "lora_dropout" not in path:
                yield module, "p"
            continue
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                yield module, name

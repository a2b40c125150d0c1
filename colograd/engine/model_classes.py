"""Patches in force while vLLM is built. They protect transformers' classes, and correct vLLM's Gemma models.

vLLM's transformers backend decorates transformers' model classes in place for vLLM's compiler. The policy uses the same
classes in the same process, so the policy would run through vLLM's ``__call__``, and a further model couldn't be
loaded. vLLM also replaces some of transformers' registered configurations. A policy loaded later would get vLLM's
configurations.

vLLM computes Gemma 3n's per-layer embeddings only in its multimodal class. vLLM's text class lacks them, so its outputs
would differ from the checkpoint's. For Gemma 4 vLLM suppresses the tokens that the generation configuration lists. The
policy doesn't suppress them, so the sampler's probabilities would differ from the policy's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from .building import replaced


@contextlib.contextmanager
def classes_apart(model: Callable[[], torch.nn.Module]) -> Iterator[None]:
    """Restore transformers' classes and configurations after vLLM has built ``model()`` in the context, or failed.

    If vLLM changed the class of a module in the model, the module gets a subclass with vLLM's changes.
    """
    before = {kind: (kind.__bases__, dict(vars(kind))) for kind in _subclasses(PreTrainedModel)}
    registered: dict[str, Any] = CONFIG_MAPPING._extra_content
    registered_before = dict(registered)
    try:
        yield
    finally:
        for model_type in registered.keys() & CONFIG_MAPPING._mapping.keys():  # configurations that vLLM registered
            del registered[model_type]
        registered |= registered_before
        theirs = {}
        for kind in [kind for kind in before if kind.__bases__ != before[kind][0]]:
            bases, own = before[kind]
            added = tuple(base for base in kind.__bases__ if base not in bases)
            changed = {name: value for name, value in vars(kind).items() if value is not own.get(name)}
            changed = {name: value for name, value in changed.items() if name not in ("__dict__", "__weakref__")}
            for name in changed:
                if name in own:
                    setattr(kind, name, own[name])
                else:
                    delattr(kind, name)
            kind.__bases__ = bases
            theirs[kind] = type(kind.__name__, (kind, *added), changed | {"__module__": kind.__module__})
    for module in model().modules() if theirs else ():
        if type(module) in theirs:
            module.__class__ = theirs[type(module)]


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for found in subclasses:
        yield found
        yield from _subclasses(found)


def computed_per_layer_inputs() -> contextlib.AbstractContextManager[None]:
    """Correct the Gemma models that vLLM builds in the returned context, as the module's docstring explains."""
    from vllm.model_executor.model_loader import base_loader

    theirs: Any = base_loader.initialize_model

    @functools.wraps(theirs)
    def initialize(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = theirs(*args, **kwargs)
        _add_per_layer_inputs(model)
        if hasattr(model, "_suppress_token_ids"):
            model._suppress_token_ids = None
        for part in model.modules():
            compute = getattr(type(part), "get_per_layer_inputs", None)
            names = compute.__code__.co_names if compute is not None else ()
            # transformers multiplies the norm's input by hidden_size ** -0.5, and vLLM doesn't. Multiplying epsilon by
            # hidden_size has the same effect. Otherwise a tiny model's log-probabilities differ by 1.4e-4 nats.
            if "per_layer_projection_norm" in names and "per_layer_projection_scale" not in names:
                part.per_layer_projection_norm.variance_epsilon *= part.config.hidden_size
        return model

    return replaced(base_loader, "initialize_model", initialize)


def _add_per_layer_inputs(model: Any) -> None:
    """Let ``model.forward`` compute ``per_layer_inputs`` (tokens, layers, size) if the caller passes None."""
    inner: Any = getattr(model, "model", None)
    embed = getattr(inner, "get_per_layer_input_embeddings", None)
    if embed is None or "per_layer_inputs" not in inspect.signature(type(model).forward).parameters:
        return
    theirs, layers = model.forward, inner.config.num_hidden_layers

    @functools.wraps(theirs)
    def forward(input_ids: torch.Tensor | None, *args: Any, per_layer_inputs: Any = None, **kwargs: Any) -> Any:
        if per_layer_inputs is None and input_ids is not None:
            per_layer_inputs = embed(input_ids).view(len(input_ids), layers, -1)
        return theirs(input_ids, *args, per_layer_inputs=per_layer_inputs, **kwargs)

    model.forward = forward

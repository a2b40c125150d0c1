"""What vLLM computes otherwise than transformers on any device, for models of the Gemma family.

Gemma 3n's embeddings of each layer are computed in its class that also sees alone: its text model gets none, and says
something else than the checkpoint. Gemma 4's logits lack the tokens that a generation configuration suppresses, which
the policy's have: the sampler's probabilities would be others'."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch

from .building import replaced


def computed_per_layer_inputs() -> contextlib.AbstractContextManager[None]:
    """While an engine is built, give a text model whose forward takes ``per_layer_inputs`` those of its tokens."""
    from vllm.model_executor.model_loader import base_loader

    theirs: Any = base_loader.initialize_model

    @functools.wraps(theirs)
    def initialize(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = theirs(*args, **kwargs)
        add_per_layer_inputs(model)
        suppress_no_tokens(model)
        for part in model.modules():
            scale_projection(part)
        return model

    return replaced(base_loader, "initialize_model", initialize)


def add_per_layer_inputs(model: Any) -> None:
    """Let ``model.forward`` compute the ``per_layer_inputs`` (tokens, layers, size) that it isn't given."""
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


def suppress_no_tokens(model: Any) -> None:
    if hasattr(model, "_suppress_token_ids"):
        model._suppress_token_ids = None


def scale_projection(decoder: Any) -> None:
    """Let a norm have the epsilon that it has behind a factor of hidden_size ** -0.5, which vLLM's code leaves out:
    1.4e-4 nats of a tiny model."""
    compute = getattr(type(decoder), "get_per_layer_inputs", None)
    names = compute.__code__.co_names if compute is not None else ()
    if "per_layer_projection_norm" in names and "per_layer_projection_scale" not in names:
        decoder.per_layer_projection_norm.variance_epsilon *= decoder.config.hidden_size

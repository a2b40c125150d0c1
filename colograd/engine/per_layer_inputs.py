"""Repairs of Gemma models that vLLM computes differently from transformers, on any device.

vLLM computes Gemma 3n's per-layer embeddings only in its multimodal class. The text model gets none, and its outputs
differ from the checkpoint's. For Gemma 4 vLLM suppresses the tokens that the generation configuration lists. The policy
doesn't suppress them, so the sampler's probabilities would differ from the policy's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch

from .building import replaced


def computed_per_layer_inputs() -> contextlib.AbstractContextManager[None]:
    """Apply this module's repairs to each model that vLLM builds while the context lasts."""
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
    """Let ``model.forward`` compute ``per_layer_inputs`` (tokens, layers, size) if the caller passes none."""
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
    """Scale the epsilon of a norm after the per-layer projection by hidden_size.

    transformers multiplies the norm's input by hidden_size ** -0.5, and vLLM's code doesn't. The epsilon makes up for
    that factor. Without it a tiny model's log-probabilities differ by 1.4e-4 nats.
    """
    compute = getattr(type(decoder), "get_per_layer_inputs", None)
    names = compute.__code__.co_names if compute is not None else ()
    if "per_layer_projection_norm" in names and "per_layer_projection_scale" not in names:
        decoder.per_layer_projection_norm.variance_epsilon *= decoder.config.hidden_size

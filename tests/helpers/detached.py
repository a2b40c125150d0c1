"""An engine that computes with its own copies of some parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from colograd.engine.vllm_engine import VLLMEngine
from colograd.weights.mapping import Slice


@contextlib.contextmanager
def detached(engine: VLLMEngine, *parts: Slice) -> Iterator[None]:
    """Context in which the engine computes with its own copies of these parameters only."""
    of_storages: dict[int, list[Slice]] = {}
    for part in parts:
        of_storages.setdefault(part.destination.untyped_storage().data_ptr(), []).append(part)
    with contextlib.ExitStack() as ends:
        for storage, fused in of_storages.items():
            readers = [  # a tied embedding has two
                (layer, name)
                for layer in engine.model.modules()
                for name, own in layer.named_parameters(recurse=False)
                if own.untyped_storage().data_ptr() == storage
            ]
            live = getattr(*readers[0])
            private = torch.nn.Parameter(live.detach().clone(), requires_grad=False)
            follow = functools.partial(_follow, live, private.detach(), [part.destination for part in fused])
            for layer, name in readers:
                ends.callback(layer.register_forward_pre_hook(follow).remove)
                ends.callback(layer._parameters.__setitem__, name, live)
                layer._parameters[name] = private
        yield


def _follow(live: torch.Tensor, private: torch.Tensor, gone: list[torch.Tensor], *_: Any) -> None:
    """Update the other parts of a fused tensor."""
    copies = [private.as_strided(place.shape, place.stride(), place.storage_offset()) for place in gone]
    kept = [copy.clone() for copy in copies]
    private.copy_(live)
    for copy, values in zip(copies, kept, strict=True):
        copy.copy_(values)

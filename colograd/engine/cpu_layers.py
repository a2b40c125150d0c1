"""Repairs of layers that vLLM computes wrongly on a CPU. They stay in force for the whole process."""

from __future__ import annotations

import functools
from typing import Any

import torch


def mend_cpu_layers() -> None:
    """Replace three of vLLM's functions for layers on a CPU.

    - Convolutions of Gated DeltaNet read weights that the engine keeps in place; vLLM's expect packed ones.
    - Rotary embeddings rotate all heads of queries (T, H, D); vLLM's kernel for (T, H * D) rotates only the first
      ones (LFM2).
    - Routers choose by sigmoids among all experts; vLLM fails an assertion there (MiniMax-M2).
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:  # a version with routers in another module
        CPURouter = None

    try:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as delta
    except ImportError:  # a version that can't run Gated DeltaNet on a CPU
        delta = None
    functions = {"_causal_conv1d_fwd_cpu": _convolution, "_causal_conv1d_update_cpu": _convolution}
    for owner, changes in (
        (delta, functions),
        (RotaryEmbedding, {"forward_cpu": _rotation}),
        (CPURouter, {"_compute_routing": _routing}),
    ):
        for name, ours in changes.items():
            theirs = getattr(owner, name, None)
            if theirs is not None and not hasattr(theirs, "mended"):
                mended = ours(theirs)
                mended.mended = True
                setattr(owner, name, mended)


def _convolution(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def convolve(*, weight: torch.Tensor, is_vnni: bool, **given: Any) -> Any:
        return theirs(weight=weight.view(weight.shape[0], weight.shape[-1]), is_vnni=False, **given)

    return convolve


def _rotation(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def rotate(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() != 3 or query.shape[1] == 1:
            return theirs(self, positions, query, key)
        found = theirs(self, positions, query.flatten(1), None if key is None else key.flatten(1))
        return found[0].view_as(query), None if key is None else found[1].view_as(key)

    return rotate


def _routing(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def route(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scoring_func == "sigmoid" and self.custom_routing_function is None and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1  # one group of all experts
        return theirs(self, *args, **kwargs)

    return route

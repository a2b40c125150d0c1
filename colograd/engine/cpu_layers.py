"""Corrections of layers that vLLM computes wrongly on a CPU. The corrections stay until the process ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def mend_cpu_layers() -> None:
    """Replace vLLM's CPU functions for Gated DeltaNet's convolution, rotary embeddings and expert routing."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:  # this version of vLLM has routers in another module
        CPURouter = None

    try:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as delta
    except ImportError:  # this version of vLLM can't run Gated DeltaNet on a CPU
        delta = None
    for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):
        _mend(delta, name, _convolve)
    _mend(RotaryEmbedding, "forward_cpu", _rotate)
    _mend(CPURouter, "_compute_routing", _route)


def _mend(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace the attribute ``name`` of ``owner`` by ``ours``, which gets vLLM's function as its first argument."""
    theirs = getattr(owner, name, None)
    if theirs is None or hasattr(theirs, "mended"):
        return

    @functools.wraps(theirs)
    def mended(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    mended.mended = True  # type: ignore[attr-defined]
    setattr(owner, name, mended)


def _convolve(theirs: Any, *, weight: torch.Tensor, is_vnni: bool, **given: Any) -> Any:
    """Pass Gated DeltaNet's convolution weights to vLLM's function unpacked, because the engine keeps them unpacked."""
    return theirs(weight=weight.view(weight.shape[0], weight.shape[-1]), is_vnni=False, **given)


def _rotate(
    theirs: Any, self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate all heads of queries (T, H, D). vLLM's kernel for (T, H * D) would rotate only the first heads (LFM2)."""
    if query.dim() != 3 or query.shape[1] == 1:
        return theirs(self, positions, query, key)
    rotated = theirs(self, positions, query.flatten(1), None if key is None else key.flatten(1))
    return rotated[0].view_as(query), None if key is None else rotated[1].view_as(key)


def _route(theirs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Route tokens by sigmoid scores among all experts, where vLLM fails an assertion (MiniMax-M2)."""
    if self.scoring_func == "sigmoid" and self.custom_routing_function is None and not self.use_grouped_topk:
        self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1  # one group holds all experts
    return theirs(self, *args, **kwargs)

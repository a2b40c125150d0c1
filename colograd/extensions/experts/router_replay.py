"""Router replay: in the trainer's forward a token goes to the experts that the engine chose for it.

Trainer and engine round differently, so that tokens with nearly equal scores would go to other experts (rollout routing
replay, R3, arXiv 2510.11370). Only the choice is replayed: the experts' shares come from the trainer's own logits, and
its router gets its gradient. If a token's experts in the engine are unknown, the policy's router chooses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ...batch import MicroBatch
from ...config import GRPOConfig
from ...policy import attention
from ...policy.layers import decoder_layers
from ...policy.logprobs import Compute, ForwardStep, Pass, install
from ...policy.lora import unwrap
from ...policy.padded import PaddedInputs
from .rider import UNKNOWN, RowExperts

ROUTED = "routed_experts"  # argument of a layer with the experts of its tokens
APART = "experts/apart"  # (2,) sum and count of a forward: choices unlike the trainer's, see `losses`


def softmax_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return shares from the probabilities over all experts, in most families normalised to a sum of 1."""
    shares = logits.softmax(-1, dtype=torch.float).gather(1, chosen)
    return shares / shares.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else shares


def sigmoid_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return shares from each expert's own score, without the correction bias, which only affects the choice."""
    shares = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * router.routed_scaling_factor


# Function of each family's router: (T, E) logits and (T, K) chosen experts -> (T, K) shares.
SHARES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), sigmoid_shares),
    "gpt_oss": lambda router, logits, chosen: logits.gather(1, chosen).softmax(1, dtype=logits.dtype),
    **dict.fromkeys(
        ("flex_olmo", "mellum", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
        softmax_shares,
    ),
}


def set_up(model: Any, config: GRPOConfig) -> None:
    if config.router_replay:
        make_replaying(model)


def make_replaying(model: Any) -> None:
    """Let the model's layers take the experts of their tokens (`ROUTED`). Without them the layers don't change."""
    if "__call__" not in vars(GradientCheckpointingLayer):
        raise ValueError(
            "router_replay is true, but with transformers 5.23 or later a checkpointed layer is computed again without "
            "the experts of its row: install transformers below 5.23, or set router_replay: false."
        )
    model, place = unwrap(model), 0
    share = SHARES[model.config.get_text_config().model_type]
    for layer in decoder_layers(model):
        routers = routers_of(layer)
        for router in routers:
            weight: torch.Tensor = router.weight
            states = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
            with torch.no_grad():
                logits, shares, own = router(states)
                is_same = torch.equal(share(router, logits, own).to(shares.dtype), shares)
            if not is_same:
                raise ValueError(
                    f"router_replay is true, but {type(router).__name__} of this version of transformers shares a "
                    "token out among its experts in a way that isn't known: set router_replay: false."
                )
            router.replayed, router.apart = None, None
            router.register_forward_hook(functools.partial(_replay, share))
        assert len(routers) <= 1, "a layer has one router"
        layer.register_forward_pre_hook(functools.partial(_hand_out, routers, place), with_kwargs=True)
        place += len(routers)
    install(model, ReplayStep())


def routers_of(module: torch.nn.Module) -> list[Any]:
    return [part for part in module.modules() if type(part).__name__.lower().endswith("topkrouter")]


class ReplayStep(ForwardStep):
    """Forward with the experts that the engine chose, of rows that have them."""

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        found, routed = inner(row), experts_of(row.batch)
        if routed is not None:
            with torch.no_grad():
                row.values[APART] = torch.stack([router.apart for router in routers_of(row.model)]).sum(0)
        return found

    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        if (routed := experts_of(row.batch)) is not None:
            packed = row.model.config._attn_implementation == attention.NAME
            row.inputs[ROUTED] = routed if packed else PaddedInputs.of(row.batch).of_tokens(routed, UNKNOWN)
        return inner(row)


def experts_of(micro_batch: MicroBatch) -> torch.Tensor | None:
    """Return the experts that a forward replays, (T, L, K); None: the model's routers choose."""
    rider = micro_batch.get(RowExperts)
    return None if rider is None else rider.experts


def _hand_out(routers: list[Any], place: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Pass a layer's part of the experts (T, L, K) to its router, also when a checkpoint recomputes the layer."""
    routed = kwargs.pop(ROUTED, None)
    for router in routers:
        router.replayed = None if routed is None else routed[:, place]
        router.apart = None
    return args, kwargs


def _replay(share: Callable[..., torch.Tensor], router: Any, args: Any, output: Any) -> Any:
    """Replace a router's choice by the engine's choice, if that is known."""
    if router.replayed is None:
        return None
    logits, shares, own = output
    known = router.replayed[:, :1] != UNKNOWN
    chosen = torch.where(known, router.replayed.long(), own)
    with torch.no_grad():
        strange = (chosen[:, :, None] != own[:, None, :]).all(-1)
        router.apart = torch.stack([strange.sum(), known.sum() * chosen.shape[1]])
    return logits, share(router, logits, chosen).to(shares.dtype), chosen

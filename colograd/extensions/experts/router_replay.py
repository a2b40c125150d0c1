"""Router replay: in the trainer's forward a token goes to the experts that the engine's router chose for the token.

Trainer and engine round differently. So for nearly equal scores the trainer's router could choose other experts than
the engine's router (rollout routing replay, R3, arXiv 2510.11370). Only the choice is replayed. The experts' weights
come from the trainer's router logits, so that the router gets its gradient. If the engine's choice for a token is
unknown, the policy's router chooses the experts.
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
from ...policy.padded import rows_of
from .rider import UNKNOWN, RowExperts

ROUTED = "routed_experts"  # Name of a layer's keyword argument with the experts of its tokens.
APART = "experts/apart"  # Key of two counts, (2,): experts that only the engine chose, and all experts that it chose.


def softmax_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights of the chosen experts: softmax over all experts. Most families normalise their sum to 1."""
    shares = logits.softmax(-1, dtype=torch.float).gather(1, chosen)
    return shares / shares.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else shares


def sigmoid_shares(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights of the chosen experts: the sigmoid of each logit, without the router's correction bias."""
    shares = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * router.routed_scaling_factor


# Per model type: a function of router, logits (T, E) and chosen experts (T, K). It returns the experts' weights (T, K).
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
    """Let the model's layers take chosen experts as keyword argument `ROUTED`. Without `ROUTED` the routers choose.
    Raise a ValueError if a router computes the experts' weights in an unknown way, or transformers recomputes layers
    without keyword arguments."""
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
                    f"A {type(router).__name__} of this version of transformers computes the experts' weights in an "
                    "unknown way, so that router_replay can't compute them: set router_replay: false."
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
    """Forward step that replays the engine's experts for rows with a `RowExperts` rider."""

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        found, routed = inner(row), experts_of(row.batch)
        if routed is not None:
            with torch.no_grad():
                row.values[APART] = torch.stack([router.apart for router in routers_of(row.model)]).sum(0)
        return found

    def states(self, inner: Callable[[Pass], torch.Tensor], row: Pass) -> torch.Tensor:
        if (routed := experts_of(row.batch)) is not None:
            packed = row.model.config._attn_implementation == attention.NAME
            if not packed:
                routed = rows_of(row.batch.layout, routed.device).of_tokens(routed, UNKNOWN).flatten(0, 1)
            row.inputs[ROUTED] = routed
        return inner(row)


def experts_of(micro_batch: MicroBatch) -> torch.Tensor | None:
    """Return the experts that a forward replays, (T, L, K). None means that the model's routers choose the experts."""
    rider = micro_batch.get(RowExperts)
    return None if rider is None else rider.experts


def _hand_out(routers: list[Any], place: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Pre-forward hook of a layer: pass the layer's experts, taken from all layers' (T, L, K), to the layer's router.
    The hook also runs when gradient checkpointing recomputes the layer."""
    routed = kwargs.pop(ROUTED, None)
    for router in routers:
        router.replayed = None if routed is None else routed[:, place]
        router.apart = None
    return args, kwargs


def _replay(share: Callable[..., torch.Tensor], router: Any, args: Any, output: Any) -> Any:
    """Forward hook of a router: replace the chosen experts by the engine's experts, where these are known."""
    if router.replayed is None:
        return None
    logits, shares, own = output
    known = router.replayed[:, :1] != UNKNOWN
    chosen = torch.where(known, router.replayed.long(), own)
    with torch.no_grad():
        strange = (chosen[:, :, None] != own[:, None, :]).all(-1)
        router.apart = torch.stack([strange.sum(), known.sum() * chosen.shape[1]])
    return logits, share(router, logits, chosen).to(shares.dtype), chosen

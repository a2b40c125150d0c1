"""Mixtures of experts where a model is checked and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...config import GRPOConfig
from ...policy.supported import ModelFeature, Wanted
from ...runtime.sizes import num_experts
from .router_replay import SHARES

if TYPE_CHECKING:
    from ...policy.loading import Policy

# Mixtures of experts that tests train, see docs/models.md. Others are proved when a run starts.
TRIED = ("glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
WHOLE = ("gpt_oss", "olmoe")  # mixtures that need a whole engine on each rank


class Experts(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        model_config, config = wanted.model_config, wanted.config
        if model_config is None:
            return
        if num_experts(model_config):
            _check_experts(model_config, config)
        elif config.router_replay:
            raise ValueError(
                f"router_replay is true, but {model_config.get_text_config().model_type} is no mixture of experts: "
                "set it to false."
            )

    def check_split(self, model_config: Any, ranks: int) -> None:
        if num_experts(model_config):
            _check_experts_split(model_config, ranks)

    def on_read(self, model: Any) -> None:
        if num_experts(model.config) and getattr(model.config, "quantization_config", None) is None:
            _freeze_as_made(model)

    def notes(self, policy: Policy, config: GRPOConfig) -> Iterator[str]:
        if coefficient := policy.router_coef(config):
            yield (
                f"experts: {coefficient:g} of the routers' load-balancing loss is added (router_aux_loss_coef), for "
                "which groups without a reward difference are trained too"
            )


def _check_experts(model_config: Any, config: GRPOConfig) -> None:
    kind = model_config.get_text_config().model_type
    _check_experts_split(model_config, config.vllm_tensor_parallel_size)
    if config.router_replay and kind not in SHARES:
        raise ValueError(
            f"router_replay is true, but how {kind}'s router shares a token out among experts isn't known: set it to "
            f"false, or choose one of {', '.join(SHARES)}."
        )
    noise = float(getattr(model_config.get_text_config(), "router_jitter_noise", None) or 0.0)
    if noise:
        raise ValueError(
            f"{kind} has router_jitter_noise {noise:g}: its training forward would send tokens to other experts than "
            "the sampler did. Set model_init_kwargs: {router_jitter_noise: 0.0}."
        )


def _check_experts_split(model_config: Any, ranks: int) -> None:
    text = model_config.get_text_config()
    kind = text.model_type
    if ranks > 1 and (kind in WHOLE or kind not in TRIED):
        raise ValueError(
            f"vllm_tensor_parallel_size is {ranks}, but the engine of {kind}, a mixture of experts, can't be split "
            "over ranks in this version: set it to 1 (each rank has a whole engine)."
        )
    size = int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
    if size % ranks:
        raise ValueError(
            f"vllm_tensor_parallel_size is {ranks}, but must divide the size of {kind}'s experts, which is {size}: "
            "choose another."
        )


def _freeze_as_made(model: Any) -> None:
    """Freeze the parameters that the class makes without a gradient, such as a router's correction biases.

    Loading forgets this.
    """
    with torch.device("meta"):
        made = type(model)(model.config)
    for name, parameter in made.named_parameters():
        if not parameter.requires_grad:
            model.get_parameter(name).requires_grad_(False)

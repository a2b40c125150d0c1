"""Checks and changes of a mixture of experts when a model is loaded."""

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

TRIED = ("glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # Model types that tests train.
WHOLE = ("gpt_oss", "olmoe")  # Model types that this version can't split over an engine's ranks.


class Experts(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        if wanted.model_config is None:
            return
        config, text = wanted.config, wanted.model_config.get_text_config()
        kind = text.model_type
        if not num_experts(wanted.model_config):
            if config.router_replay:
                raise ValueError(f"The model has no experts ({kind}): set router_replay: false.")
            return
        self.check_split(wanted.model_config, config.vllm_tensor_parallel_size)
        if config.router_replay and kind not in SHARES:
            raise ValueError(
                f"router_replay is true, but it isn't known how routers of {kind} weight their experts: set "
                f"router_replay: false, or choose a model of one of the types {', '.join(SHARES)}."
            )
        if noise := float(getattr(text, "router_jitter_noise", None) or 0.0):
            raise ValueError(
                f"{kind} has router_jitter_noise {noise:g}: its training forward would send tokens to other experts "
                "than the sampler did. Set model_init_kwargs: {router_jitter_noise: 0.0}."
            )

    def check_split(self, model_config: Any, ranks: int) -> None:
        if not num_experts(model_config):
            return
        text = model_config.get_text_config()
        kind = text.model_type
        if ranks > 1 and (kind in WHOLE or kind not in TRIED):
            raise ValueError(
                f"vllm_tensor_parallel_size is {ranks}, but {kind} is a mixture of experts that this version "
                "can't split over the ranks of an engine: set vllm_tensor_parallel_size: 1 (an engine per rank)."
            )
        size = int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
        if size % ranks:
            raise ValueError(
                f"vllm_tensor_parallel_size is {ranks}, but for {kind} it must divide the experts' intermediate size, "
                f"which is {size}: choose a divisor of that size."
            )

    def on_read(self, model: Any) -> None:
        """Freeze parameters again that the model's class creates frozen, such as a router's correction biases.

        transformers makes them trainable when it loads weights."""
        if not num_experts(model.config) or getattr(model.config, "quantization_config", None) is not None:
            return
        with torch.device("meta"):
            made = type(model)(model.config)
        for name, parameter in made.named_parameters():
            if not parameter.requires_grad:
                model.get_parameter(name).requires_grad_(False)

    def notes(self, policy: Policy, config: GRPOConfig) -> Iterator[str]:
        if coefficient := policy.router_coef(config):
            line = "experts: the routers' load-balancing loss trains groups without a reward difference too"
            yield f"{line} (router_aux_loss_coef {coefficient:g})"

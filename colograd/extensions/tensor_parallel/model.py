"""Checks of a model for `sharding: tensor`, where the policy has the engine's tensor-parallel layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config import GRPOConfig
from ...parallel.shards import parts_of
from ...policy.supported import ModelFeature, Wanted

if TYPE_CHECKING:
    from ...policy.loading import Policy

# Model types whose policy can have the engine's tensor-parallel layout.
CUT = ("gemma3_text", "lfm2", "llama", "qwen2", "qwen3", "qwen3_moe")


class InEngineLayout(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        model_config, config = wanted.model_config, wanted.config
        if model_config is None or not config.tensor_parallel:
            return
        if model_config.model_type not in CUT:
            raise ValueError(
                f"sharding is {config.sharding!r}, but {model_config.model_type} isn't among the models that this "
                f"version can divide like vLLM ({', '.join(CUT)}): set sharding: gradients. If the policy doesn't fit "
                "one rank's memory and has no adapter, set sharding: fsdp."
            )
        dropout = {name: value for name, value in vars(model_config).items() if "dropout" in name and value}
        if dropout and not config.disable_dropout:
            name, value = dropout.popitem()
            raise ValueError(
                f"sharding is {config.sharding!r} and the model's {name} is {value}, but the ranks of an engine would "
                "draw different dropout masks for the same row: set disable_dropout: true."
            )

    def can_be_cut(self, model_config: Any) -> bool:
        return model_config.model_type in CUT

    def on_load(self, model: Any, path: str, config: GRPOConfig) -> None:
        if parts_of(model) is not None:
            raise ValueError("A trainer with `sharding: tensor` has divided this model: load the model again.")


def check_policy(policy: Policy, config: GRPOConfig, samples: bool) -> Policy:
    if config.tensor_parallel and not samples:
        raise ValueError(
            f"sharding is {config.sharding!r}, which divides the policy as the engine does, but recorded steps are "
            "trained without an engine: set sharding: gradients or fsdp."
        )
    if config.tensor_parallel and policy.adapter is not None and policy.adapter.why_merged:
        raise ValueError(
            f"sharding is {config.sharding!r}, but {policy.adapter.why_merged}, and the adapter can't be merged into "
            "weights that policy and engine share: set sharding: gradients, or train an adapter that vLLM serves."
        )
    return policy

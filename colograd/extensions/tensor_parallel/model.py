"""Policies in the engine's layout where a model is checked and loaded."""

from __future__ import annotations

from typing import Any

from ...config import GRPOConfig
from ...policy.supported import ModelFeature, Wanted
from .layers import check_split

# Models that support a policy in the engine's tensor-parallel layout.
CUT = ("gemma3_text", "lfm2", "llama", "qwen2", "qwen3", "qwen3_moe")


class InEngineLayout(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        if wanted.model_config is not None and wanted.config.tensor_parallel:
            _check_cut(wanted.model_config, wanted.config)

    def can_be_cut(self, model_config: Any) -> bool:
        return model_config.model_type in CUT

    def on_load(self, model: Any, path: str, config: GRPOConfig) -> None:
        check_split(model)


def _check_cut(model_config: Any, config: GRPOConfig) -> None:
    remedy = "set sharding: gradients, or fsdp for a policy that no rank has room for"
    if model_config.model_type not in CUT:
        raise ValueError(
            f"sharding is {config.sharding!r}, but {model_config.model_type} isn't among the models whose policy can "
            f"lie in the engine's layout in this version ({', '.join(CUT)}): {remedy}."
        )
    dropout = {name: value for name, value in vars(model_config).items() if "dropout" in name and value}
    if dropout and not config.disable_dropout:
        name, value = dropout.popitem()
        raise ValueError(
            f"sharding is {config.sharding!r} and the model has {name} {value}, but the ranks of an engine would drop "
            "different parts of one row: set disable_dropout: true."
        )

"""Checks of models for sequence parallelism. The module imports little, because it runs before models are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config import GRPOConfig
from ...policy.supported import ModelFeature, check_shared_rows

if TYPE_CHECKING:
    from ...policy.loading import Policy


class WholeRows(ModelFeature):
    def why_rows_stay_whole(self, model: Any) -> str:
        text = model.config.get_text_config()
        given: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
        ways = [given, *(of_layers for of_layers in given.values() if isinstance(of_layers, dict))]
        kinds = [str(way.get("rope_type") or "") for way in ways]
        if text.model_type == "phimoe" or any(kind == "longrope" or "dynamic" in kind for kind in kinds):
            return f"{type(model).__name__} chooses its rotary frequencies by the row's last position"
        return ""


def check_policy(policy: Policy, config: GRPOConfig, samples: bool) -> Policy:
    check_shared_rows(policy.model, config.sequence_parallel_size, policy.why_padded)
    return policy

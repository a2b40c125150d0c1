"""Models whose rows ranks can share out."""

from __future__ import annotations

from typing import Any

from ...policy.supported import ModelFeature


class SharedTokens(ModelFeature):
    def why_rows_stay_whole(self, model: Any) -> str:
        if _rotates_by_length(model.config):
            return f"{type(model).__name__} chooses its rotary frequencies by the row's last position"
        return ""


def _rotates_by_length(model_config: Any) -> bool:
    """Return whether rotary frequencies depend on the largest position in a forward."""
    text = model_config.get_text_config()
    given: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    ways = [given, *(of_layers for of_layers in given.values() if isinstance(of_layers, dict))]
    kinds = [str(way.get("rope_type") or "") for way in ways]
    return text.model_type == "phimoe" or any(kind == "longrope" or "dynamic" in kind for kind in kinds)

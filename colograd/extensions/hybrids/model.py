"""Models with a recurrent state where a model is checked."""

from __future__ import annotations

from typing import Any

from ...policy.supported import ModelFeature
from ...runtime import registry
from .recurrent import mixers_of


class Hybrids(ModelFeature):
    def why_rows_stay_whole(self, model: Any) -> str:
        shares_out = registry.hooks("shares_out_mixer")  # functions of a mixer
        stay = {type(mixer).__name__ for mixer in mixers_of(model) if not any(can(mixer) for can in shares_out)}
        reason = f"has layers of {', '.join(sorted(stay))}, whose state goes from token to token"
        return f"{type(model).__name__} {reason}" if stay else ""

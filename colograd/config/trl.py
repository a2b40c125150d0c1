"""TRL's fields that change nothing here: scripts and callbacks read them, and files may have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from .knob import REFUSED, RENAMED, UNUSED, Rules, check_refused, knob

_HELP = {name: f"No effect: {reason}." for name, reason in UNUSED.items()}
_HELP |= {name: f"Another value is an error: {reason}." for name, reason in REFUSED.items()}
_HELP |= {name: f"The old name of `{present}`." for name, present in RENAMED.items()}


@dataclass
class TRLKnobs(TrainingArguments):
    """Kept for TRL's files."""

    use_vllm: bool = knob(True, _HELP["use_vllm"])
    vllm_mode: str = knob("colocate", "Always `colocate`; TRL's other mode, `server`, is an error.")
    ds3_gather_for_generation: bool = knob(True, _HELP["ds3_gather_for_generation"])
    pad_to_multiple_of: int | str | None = knob("auto", _HELP["pad_to_multiple_of"])
    vllm_server_base_url: str | None = knob(None, _HELP["vllm_server_base_url"])
    vllm_server_host: str = knob("0.0.0.0", _HELP["vllm_server_host"])
    vllm_server_port: int = knob(8000, _HELP["vllm_server_port"])
    vllm_server_timeout: float = knob(240.0, _HELP["vllm_server_timeout"])
    vllm_group_port: int = knob(51216, _HELP["vllm_group_port"])
    cache_implementation: str | None = knob(None, _HELP["cache_implementation"])
    use_transformers_continuous_batching: bool = knob(False, _HELP["use_transformers_continuous_batching"])
    transformers_continuous_batching_config: dict[str, Any] | str | None = knob(
        None, _HELP["transformers_continuous_batching_config"]
    )
    use_transformers_paged: bool = knob(False, _HELP["use_transformers_paged"])
    vllm_importance_sampling_cap: float | None = knob(None, _HELP["vllm_importance_sampling_cap"])

    def _take_old_names(self) -> list[str]:
        """Move the values of TRL's old names to the present names.

        Returns:
            A line for each.

        Raises:
            ValueError: both names are set, to different values.
        """
        lines = []
        for old, present in RENAMED.items():
            if (value := getattr(self, old)) is None:
                continue
            default = type(self).__dataclass_fields__[present].default
            if getattr(self, present) not in (default, value):
                raise ValueError(f"`{old}` is the old name of `{present}`, and both are given: remove it.")
            setattr(self, present, value)
            lines.append(f"config: `{old}` is the old name of `{present}`")
        return lines

    def _check_trl(self) -> None:
        """Check fields that may change after construction: a trainer checks them again."""
        check_refused(self)
        Rules(one_of=("colocate",), note=" (there is no server: each rank has its own engine)").check(
            "vllm_mode", self.vllm_mode
        )

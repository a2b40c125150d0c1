"""Settings of Liger's kernels in a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from colograd.config import GRPOConfig


def config(**changes: Any) -> GRPOConfig:
    return GRPOConfig(**({"output_dir": "unused", "report_to": "none"} | changes))


def test_ligers_losses_have_no_part() -> None:
    """Liger's losses aren't used, not even if transformers applies Liger's kernels."""
    made = config(use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert made.liger_kernel_config == {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"torch_compile": True, "use_liger_kernel": True}, "both true, but each fuses the same parts of a layer: set"),
        (
            {"liger_kernel_config": {"fused_linear_cross_entropy": True}},
            "fused_linear_cross_entropy: true, but that replaces the model's own loss",
        ),
    ],
)
def test_liger_settings_are_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**given)

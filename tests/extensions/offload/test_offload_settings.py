"""Settings of offloading: their spellings, and a launcher file's value."""

from __future__ import annotations

from typing import Any

import pytest

from colograd import GRPOConfig


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", report_to="none", **settings)


def test_offload_is_one_way_of_checkpointing() -> None:
    made = config(gradient_checkpointing="offload")
    assert made.gradient_checkpointing is True and made.offloads_activations and made.checkpointing == 1


def test_plan_resolves_automatic_offload() -> None:
    undecided = config(offload_optimizer="auto")
    undecided.resolve_offload(True, True, True)
    assert undecided.offload_optimizer == "stream" and undecided.offload_gradients and undecided.offloads_activations


@pytest.mark.parametrize(("stage", "way"), [(0, "none"), (1, "sampling"), (2, "sampling"), ("3", "sampling")])
def test_deepspeed_offload_is_read(stage: Any, way: str) -> None:
    given = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    assert config(deepspeed=given).offload_optimizer == way

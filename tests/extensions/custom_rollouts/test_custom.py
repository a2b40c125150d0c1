"""Rollouts written by a user's function, with each kind of mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from colograd.batch import ModelInput, Prompt
from colograd.engine.sampling import Sampling
from colograd.extensions.custom_rollouts.source import CustomRollouts

MASK = [[1, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("mask", [MASK, torch.tensor(MASK), np.array(MASK), [np.array(m) for m in MASK], None])
def test_masks_may_be_arrays(mask: Any) -> None:
    def write(prompts: list[Any]) -> dict[str, Any]:
        prompts[0][0]["content"] = "gone"
        return {
            "prompt_ids": [[1, 2]] * 2,
            "completion_ids": torch.tensor([[5, 6, 7], [5, 6, 7]]),
            "logprobs": np.full((2, 3), -1.0),
            "env_mask": mask,
        }

    engine: Any = SimpleNamespace(require=lambda version: None, vocab_size=258)
    prompt = Prompt({"prompt": [{"role": "user", "content": "hi"}]}, ModelInput((1, 2)), 0)
    (group,) = CustomRollouts(engine, write, {7}).generate([prompt], Sampling(2, 10, 1.0, {}), version=1, seed=0)
    sampled = [rollout.sampled.int().tolist() for rollout in group.rollouts]
    assert sampled == ([[1] * 3] * 2 if mask is None else MASK)
    assert group.example["prompt"] == [{"role": "user", "content": "hi"}]

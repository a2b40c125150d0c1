"""Reward functions: find them, call them in worker processes or in the trainer's process, and check their rewards.

A reward function has TRL's signature. It is called with keywords only, for one group of G completions. With
`reward_call: all` one call scores all groups that a rank samples for a round. A function without ``**kwargs`` is called
only with the keywords that its signature names.

    f(prompts, completions, completion_ids, completion_mask, trainer_state, log_extra, log_metric, **columns)
        -> list[float | None]    # one reward per completion; for an agent's session also a list, one reward per turn

``columns`` are the dataset's columns, repeated G times, and columns that the rollouts add. ``prompt`` and the names
above are left out. A reward ``None`` means that the function abstains. ``async def`` functions run concurrently.

Worker processes import this package without torch. Names that need torch are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .answers import get_soft_overlong_punishment, gsm8k_reward, last_number, number_in, text_of, think_format_reward

if TYPE_CHECKING:
    from .functions import RewardError, RewardFunction, resolve_rewards, weighted_sum
    from .scoring import Ready, Scorer, Scoring

_MODULES = {
    "functions": ("RewardError", "RewardFunction", "resolve_rewards", "weighted_sum"),
    "mathematics": ("accuracy_reward", "math_answer_reward", "reasoning_accuracy_reward"),
    "models": ("RewardModel", "with_models"),  # `mathematics` and `models` are modules of the extension `graders`.
    "scoring": ("Ready", "Scorer", "Scoring"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Reward functions: resolve, call, time, isolate, check.

`functions` finds them, `builtin` has those that come along (`answers` reads texts and numbers, `mathematics` compares
expressions in a process of its own), `models` makes functions of reward models. `calling` makes one call's keywords and
checks what it returned; `turns` has rewards of an agent's single answers; `scoring` says where and when each call runs.

A reward function has TRL's signature, called with keywords only and for one group at a time:

    f(prompts, completions, completion_ids, completion_mask, trainer_state, log_extra, log_metric, **columns)
        -> list[float | None]    # G numbers; for an agent's session also a list, a number for each of its answers

``columns`` are the dataset's other columns, each repeated G times; ``None`` means that the function abstains. A
function without ``**kwargs`` gets only what it names. ``async def`` functions of a group run concurrently.

The built-in functions are imported with the package, the rest on first use: a worker that calls them needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .answers import number_in, text_of
from .builtin import (
    BUILTIN_REWARDS,
    accuracy_reward,
    get_soft_overlong_punishment,
    gsm8k_reward,
    last_number,
    math_answer_reward,
    reasoning_accuracy_reward,
    think_format_reward,
)

if TYPE_CHECKING:
    from .calling import weighted_sum
    from .functions import RewardError, RewardFunction, resolve_rewards
    from .models import RewardModel, with_models
    from .scoring import Ready, Scorer, Scoring, score_group

_MODULES = {
    "calling": ("weighted_sum",),
    "functions": ("RewardError", "RewardFunction", "resolve_rewards"),
    "models": ("RewardModel", "with_models"),
    "scoring": ("Ready", "Scorer", "Scoring", "score_group"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

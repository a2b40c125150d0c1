"""Reward functions: resolve, call, time, isolate, check.

`functions` finds reward functions. `builtin` has the built-in ones, `answers` reads texts and numbers. `calling` makes
one call's keywords and checks the returned values. `scoring` decides where and when each call runs. Extensions offer
further reward functions at the seam ``rewards``, and turn models into functions at the seam ``reward_models``.

A reward function has TRL's signature, and is called with keywords only, for one group at a time:

    f(prompts, completions, completion_ids, completion_mask, trainer_state, log_extra, log_metric, **columns)
        -> list[float | None]    # G numbers; for an agent's session also a list with a number per answer

``columns`` are the dataset's other columns, each repeated G times. ``None`` means that the function abstains. A
function without ``**kwargs`` gets only the keywords that it names. ``async def`` functions of a group run concurrently.

The functions of the core are imported with the package, the rest on first use, because their workers need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .answers import number_in, text_of
from .builtin import builtin_rewards, get_soft_overlong_punishment, gsm8k_reward, last_number, think_format_reward

if TYPE_CHECKING:
    from collections.abc import Callable

    from .functions import RewardError, RewardFunction, resolve_rewards
    from .scoring import Ready, Scorer, Scoring
    from .values import weighted_sum

    BUILTIN_REWARDS: dict[str, Callable[..., Any]]
    RewardModel: Any
    with_models: Any
    accuracy_reward: Callable[..., list[float | None]]
    math_answer_reward: Callable[..., list[float | None]]
    reasoning_accuracy_reward: Callable[..., list[float | None]]

_MODULES = {
    "values": ("weighted_sum",),
    "functions": ("RewardError", "RewardFunction", "resolve_rewards"),
    "mathematics": ("accuracy_reward", "math_answer_reward", "reasoning_accuracy_reward"),  # of an extension
    "models": ("RewardModel", "with_models"),  # of an extension
    "scoring": ("Ready", "Scorer", "Scoring"),
}


def __getattr__(name: str) -> Any:
    if name == "BUILTIN_REWARDS":
        return builtin_rewards()
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

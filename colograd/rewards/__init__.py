"""Reward functions: resolve, call, time, isolate, check.

`functions` finds them, `builtin` has those that come along, `models` makes functions of reward models. `calling` makes
one call's keywords and checks what it returned; `turns` has rewards of an agent's single answers; `scoring` says where
and when each call runs.

A reward function has TRL's signature, called with keywords only and for one group at a time:

    f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)
        -> list[float | None]    # G numbers; for an agent's session also a list, a number for each of its answers

``columns`` are the dataset's other columns, each repeated G times; ``None`` means that the function abstains. A
function without ``**kwargs`` gets only what it names. ``async def`` functions of a group run concurrently.
"""

from .builtin import (
    BUILTIN_REWARDS,
    accuracy_reward,
    get_soft_overlong_punishment,
    last_number,
    reasoning_accuracy_reward,
    think_format_reward,
)
from .calling import weighted_sum
from .functions import RewardError, RewardFunction, resolve_rewards
from .models import RewardModel, with_models
from .scoring import Ready, Scorer, Scoring, score_group

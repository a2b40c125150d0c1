"""Error messages for failed calls of reward functions, and copies of the trainer's state for reward functions."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

from ..batch import Group
from ..usercode.calls import Outcome, awaited_outcome, place_in
from ..usercode.copies import own_copy
from ..usercode.worker_process import CallLog
from .functions import RewardError, RewardFunction

TAKEN_FOR_TEXT = re.compile(r"AttributeError: '(list|dict)' object|TypeError: .*\blist\b")


class StateCopies:
    """Makes copies of transformers' `TrainerState` for reward functions, because a function may change its copy."""

    def __init__(self) -> None:
        self._state: tuple[Any, Any] = ((), None)  # Key of the last copied state (step, epoch, ...), and the copy.
        self._pickled: tuple[Any, bytes] = ((), b"")

    def copy(self, trainer_state: Any) -> tuple[Any, Any]:
        """Return a key (step, epoch, ...) and a copy of the trainer's state. A new key makes a new copy."""
        fields = vars(trainer_state) if hasattr(trainer_state, "__dict__") else {}
        key = (fields.get("global_step"), fields.get("epoch"), len(fields.get("log_history") or ()))
        if key != self._state[0]:
            own = copy.copy(trainer_state)
            for name, value in fields.items():
                setattr(own, name, own_copy(value))
            self._state = (key, own)
        return self._state

    def pickled(self, trainer_state: Any) -> tuple[Any, bytes]:
        """Return a key (step, epoch, ...) and the trainer's state, pickled for worker processes. A dataclass such as
        transformers' `TrainerState` is pickled as a `SimpleNamespace`. Otherwise a worker would have to import
        transformers, and the import would use up the first call's time limit."""
        key, own = self.copy(trainer_state)
        if key != self._pickled[0]:
            bare = SimpleNamespace(**vars(own)) if dataclasses.is_dataclass(own) else own
            self._pickled = (key, pickle.dumps(bare))
        return self._pickled


def late_error(reward: RewardFunction, position: int, timeout: float | None, completions: int) -> RewardError:
    return RewardError(
        reward.name,
        position,
        None,
        f"it gave no answer within reward_timeout ({timeout or 0:g} s) on {completions} completions. "
        "It runs in the trainer's process, where a call can't be ended alone, so the run ends: raise "
        "reward_timeout, or set reward_workers or make it async, where a late call abstains and training goes on.",
    )


def raised_error(reward: RewardFunction, group: Group, outcome: Outcome) -> RewardError:
    line, traceback = outcome.value
    place = place_in(traceback)
    where = f" ({place})" if place else ""
    of_messages = isinstance(group.example["prompt"], list) and TAKEN_FOR_TEXT.match(line)
    hint = (
        "Completions are lists of messages here, because the prompts are (a conversational dataset, or system_prompt): "
        'the text is `completion[0]["content"]`. '
    )
    return RewardError(
        reward.name,
        group.position,
        None,
        f"it raised {line}{where}, but must return one number per completion, and None where it has no opinion. "
        f"{hint if of_messages else ''}Mend it, or set reward_on_error: abstain to go on without its opinion wherever "
        f"it fails. Its traceback:\n{traceback}",
    )


async def logged_outcome(awaitable: Awaitable[Any], elapsed: float, timeout: float | None, log: CallLog) -> Outcome:
    """Await the result of an async reward function for at most ``timeout`` seconds. Return the call's outcome with the
    logged values. ``elapsed`` seconds, which the call took to return its awaitable, count in the outcome's time."""
    outcome = await awaited_outcome(awaitable, timeout)
    return dataclasses.replace(outcome, seconds=elapsed + outcome.seconds, logged=log.content())

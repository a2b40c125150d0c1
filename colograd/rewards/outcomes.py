"""Errors of calls of reward functions, with their remedies; and copies of the trainer's state for the functions."""

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

TAKEN_FOR_TEXT = re.compile(r"AttributeError: '(list|dict)' object|TypeError: .*\blist\b")  # errors of using messages


class StateCopies:
    """Copies of the trainer's state, which functions may change."""

    def __init__(self) -> None:
        self._state: tuple[Any, Any] = ((), None)  # a key of the trainer's state, and a copy for functions
        self._pickled: tuple[Any, bytes] = ((), b"")

    def copy(self, trainer_state: Any) -> tuple[Any, Any]:
        """Return a key of the trainer's state, and a copy. The state is copied once per step, not once per call."""
        fields = vars(trainer_state) if hasattr(trainer_state, "__dict__") else {}
        key = (fields.get("global_step"), fields.get("epoch"), len(fields.get("log_history") or ()))
        if key != self._state[0]:
            own = copy.copy(trainer_state)
            for name, value in fields.items():
                setattr(own, name, own_copy(value))
            self._state = (key, own)
        return self._state

    def pickled(self, trainer_state: Any) -> tuple[Any, bytes]:
        """Return the same key, and the pickled state for workers. transformers' state is pickled as its bare fields.
        Otherwise a worker would import transformers, and that would use up the first call's time limit."""
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
    """Await an async call that returned its awaitable after ``elapsed`` seconds. Return its outcome with its log."""
    outcome = await awaited_outcome(awaitable, timeout)
    return dataclasses.replace(outcome, seconds=elapsed + outcome.seconds, logged=log.content())

"""Calls of tools in a run's record."""

from __future__ import annotations

import functools
import time
from array import array
from typing import Any

import torch

from colograd.batch import FinishReason, Group, ScoredGroup
from colograd.batch import Rollout as Completion
from colograd.extensions.recording.timeline import Timeline
from colograd.extensions.tools.tool_format import ToolCall
from colograd.extensions.tools.toolbox import Toolbox
from colograd.rewards import Scorer, resolve_rewards


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: a number
        b: another
    """
    time.sleep(0.02)
    return a + b


def slow(completions: list[Any], **kwargs: Any) -> list[float]:
    time.sleep(0.02)
    return [1.0] * len(completions)


def test_calls_of_rewards_and_tools_are_told_with_their_times() -> None:
    """Calls of missing tools are recorded too. Without a listener nothing is recorded."""
    lanes, scorer, tools = Timeline(), Scorer(resolve_rewards([slow], None)), Toolbox([add])
    group = scored(0, [0.0, 1.0], [2, 2]).group
    scorer.submit([group], [["a", "b"]]).result()
    lanes.begin()
    scorer.on_call, tools.on_call = (functools.partial(lanes.call, kind) for kind in ("rewards", "tools"))
    scorer.submit([group], [["a", "b"]]).result()
    session, _ = tools.open({})
    answers = tools.call(session, [ToolCall("add", {"a": 1, "b": 2}), ToolCall("divide", {})])
    while not all(call.done() for call in answers):
        time.sleep(0.005)
    lanes.end(None)
    found = lanes.take()
    assert found is not None
    ((name, start, end, completions),) = found["rewards"]
    assert (name, completions) == ("slow", 2) and start >= 0 and end - start >= 0.019
    assert sorted(call[0] for call in found["tools"]) == ["add", "divide"]
    assert all(0 <= start <= end <= found["seconds"] + 0.001 for _, start, end in found["tools"])
    assert max(end - start for _, start, end in found["tools"]) >= 0.019
    tools.close()
    scorer.close()


def scored(position: int, rewards: list[float], lengths: list[int], **changes: Any) -> ScoredGroup:
    rollouts = tuple(
        Completion(
            (1, 2),
            array("i", [3] * length),
            torch.full((length,), -1.0),
            torch.ones(length, dtype=torch.bool),
            FinishReason.STOP,
            0,
        )
        for length in lengths
    )
    advantages = changes.pop("advantages", torch.tensor(rewards))
    return ScoredGroup(Group({"prompt": "?"}, rollouts, position), torch.tensor(rewards)[:, None], advantages)

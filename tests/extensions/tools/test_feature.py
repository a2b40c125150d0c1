"""The part of a run that tools and environments add."""

from __future__ import annotations

import time
from typing import Any

import pytest
import tiny
from datasets import Dataset, IterableDataset
from tool_cases import Counter, Silent

from colograd.data.columns import EMPTY
from colograd.extensions.tools.feature import ToolFeature
from colograd.extensions.tools.toolbox import Toolbox
from colograd.extensions.trl_names.attributes import TRLNames
from colograd.policy.loading import load_policy
from colograd.rollout.texts import ToolCall
from colograd.training.preparation import train_prompts_of


def outcome(begun: Any) -> Any:
    """The value of a call, once it is there."""
    started = time.monotonic()
    while not all(call.done() for call in begun):
        assert time.monotonic() - started < tiny.PATIENCE
        time.sleep(0.01)
    return begun[0].future.result().value


@pytest.mark.parametrize("streamed", [True, False])
def test_rows_of_environments_need_no_prompt(tiny_model, tmp_path, streamed) -> None:
    """A row needs only the environment's name and the arguments of `reset`. A stream doesn't know its columns."""
    rows = [{"environment": "counter", "start": n} for n in range(8)]
    dataset = IterableDataset.from_generator(lambda: iter(rows)) if streamed else Dataset.from_list(rows)
    config = tiny.config(tmp_path, shuffle_dataset=False)
    policy = load_policy(tiny_model, None, config)
    made = train_prompts_of(dataset, policy, config, ToolFeature(Toolbox(None, {"counter": Counter})))
    prompts = made.first(2) if streamed else made.prompts()[:2]
    assert [prompt.example for prompt in prompts] == [{**row, "prompt": EMPTY} for row in rows[:2]]


def test_tools_are_a_list_and_environments_those_of_the_round() -> None:
    class Game:
        def reset(self) -> None: ...

        def move(self, to: str) -> str:
            """Moves.

            Args:
                to: where
            """
            return to

    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: one
            b: another
        """
        return a + b

    toolbox, bare = Toolbox([add], Game), TRLNames()
    bare.feature = ToolFeature(toolbox)  # type: ignore[attr-defined]
    try:
        assert [tool.__name__ for tool in bare.tools] == ["add", "move"] and bare.tools[0] is add
        assert bare.environments is None and bare.environment_factories == {None: Game}
        lent = [toolbox.open({"prompt": "x"})[0].instance for _ in range(2)]
        assert bare.environments == lent
        toolbox.environments.take_back()
        assert bare.environments == lent, "until the next round"
        toolbox.open({"prompt": "x"})
        assert len(bare.environments) == 1
    finally:
        toolbox.close()


def test_tools_change_no_data_of_the_trainer() -> None:
    class Eager(Silent):
        def reset(self, tests: list[Any], **kwargs: Any) -> str:
            tests.pop()
            return str(len(tests))

        def take(self, items: list[int]) -> str:
            """Take items.

            Args:
                items: which
            """
            items.clear()
            return "taken"

    def sort(items: list[int]) -> str:
        """Sort items.

        Args:
            items: which
        """
        items.sort()
        return str(items)

    row, calls = {"tests": [1, 2, 3]}, [ToolCall("sort", {"items": [2, 1]}), ToolCall("take", {"items": [1]})]
    box = Toolbox([sort], Eager)
    try:
        opened = [box.open(row) for _ in range(3)]
        assert [outcome(begun) for _, begun in opened] == ["2"] * 3
        assert [outcome(box.call(opened[0][0], [call])) for call in calls] == ["[1, 2]", "taken"]
    finally:
        box.close()
    assert row == {"tests": [1, 2, 3]} and [call.arguments["items"] for call in calls] == [[2, 1], [1]]

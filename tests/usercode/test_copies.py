"""The user's code gets copies of the trainer's data, and changes nothing but them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import tiny
import torch
from PIL import Image
from tool_cases import Silent

from colograd.extensions.agents.sessions import Agent
from colograd.extensions.tools.tool_format import ToolCall
from colograd.extensions.tools.toolbox import Toolbox
from colograd.usercode.copies import own_copy


def outcome(begun: Any) -> Any:
    """The value of a call, once it is there."""
    started = time.monotonic()
    while not begun.done():
        assert time.monotonic() - started < tiny.PATIENCE
        time.sleep(0.01)
    return begun.outcomes()[0][1].value


def test_data_is_copied_at_every_depth() -> None:
    image, array, tensor = Image.new("RGB", (2, 2)), np.zeros(2), torch.zeros(2)
    given = {"a": [{"b": (1, [2])}, {3}], "image": image, "array": array, "tensor": [tensor], "text": "t"}
    copied = own_copy(given)
    assert copied["a"] == given["a"] and copied["text"] is given["text"]
    copied["a"][0]["b"][1].append(4)
    copied["a"][1].add(4)
    copied["image"].putpixel((0, 0), (9, 9, 9))
    copied["array"][0] = copied["tensor"][0][0] = 9
    assert given["a"] == [{"b": (1, [2])}, {3}] and image.getpixel((0, 0)) == (0, 0, 0)
    assert array[0] == 0 and tensor[0] == 0


def test_objects_of_the_user_are_passed_on() -> None:
    lock, game = threading.Lock(), Silent()
    lines = (line for line in "ab")
    copied = own_copy([game, lock, lines, {"game": game}])
    assert copied[0] is game and copied[1] is lock and copied[2] is lines and copied[3]["game"] is game


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


def test_an_agent_changes_no_data_of_the_trainer() -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "tests": [{"left": 3}]}

    def agent(row: dict[str, Any]) -> int:
        row["tests"][0]["left"] -= 1
        row["prompt"].clear()
        return row["tests"][0]["left"]

    programs = [Agent.of(agent).start("http://localhost", "key", "model", row) for _ in range(2)]
    assert [program.future.result(tiny.PATIENCE).value for program in programs] == [2, 2]
    assert row == {"prompt": [{"role": "user", "content": "hi"}], "tests": [{"left": 3}]}

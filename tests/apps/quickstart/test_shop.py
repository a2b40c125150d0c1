"""The shop agent with a scripted model: the requests that the model gets, and the agent's reward. No engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

PRICE, TOTAL = ("price", {"item": "lamp"}), ("calculator", {"expression": "20 * 34"})


def serve(monkeypatch: pytest.MonkeyPatch, replies: list[Any]) -> tuple[float, list[list[Any]]]:
    """Run a session with these replies (calls or texts). Returns the reward, and the messages of each request."""
    from colograd.apps.quickstart import shop  # imports openai, which takes seconds

    asked, left = [], iter(replies)

    def create(model: str, messages: list[Any], tools: list[Any]) -> Any:
        asked.append([*messages])
        reply = next(left)
        if isinstance(reply, str):
            message = SimpleNamespace(content=reply, tool_calls=None)
        else:
            function = SimpleNamespace(name=reply[0], arguments=json.dumps(reply[1]))
            message = SimpleNamespace(content=None, tool_calls=[SimpleNamespace(id="a", function=function)])
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    chat = SimpleNamespace(completions=SimpleNamespace(create=create))
    monkeypatch.setattr(shop, "CLIENT", SimpleNamespace(with_options=lambda **given: SimpleNamespace(chat=chat)))
    reward = shop.run("http://127.0.0.1", "key", "model", {"item": "lamp", "count": 20, "answer": "680"})
    assert next(left, None) is None, "each reply was asked for"
    return reward, asked


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["680"], 0.0),
        ([("price", {"item": "sofa"}), "97"], 0.0),
        ([("price", {"thing": "lamp"}), "so"], 0.0),
        ([("cost", {}), "so"], 0.0),
        ([PRICE, "700"], 0.2),
        ([PRICE, TOTAL, "681"], 0.4),
        ([PRICE, TOTAL, TOTAL, TOTAL], 0.4),
        ([PRICE, TOTAL, "680"], 1.0),
    ],
)
def test_parts_of_the_way_are_rewarded(monkeypatch: pytest.MonkeyPatch, replies: list[Any], reward: float) -> None:
    assert serve(monkeypatch, replies)[0] == reward


def test_the_context_is_written_anew_once_the_price_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first, second, third) = serve(monkeypatch, [PRICE, TOTAL, "680"])
    assert first[-1]["content"] == "How much is a lamp?" and second[-1]["content"] == "What is 20 * 34?"
    assert first[0] == second[0] and not any(message in second for message in first[1:])
    assert third[: len(second)] == second and third[-1]["content"] == "680"


def test_orders_repeat_with_the_seed() -> None:
    from colograd.apps.quickstart import shop

    rows = shop.orders(20, seed=3)
    assert all(int(row["answer"]) == row["count"] * shop.PRICES[row["item"]] for row in rows)
    assert rows.to_list() == shop.orders(20, seed=3).to_list() != shop.orders(20, seed=4).to_list()
    with pytest.raises(ValueError, match="size is 0, but must be at least 1"):
        shop.orders(0)

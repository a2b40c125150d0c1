"""A task with an agent for the quickstart's model: orders of a shop, with two tools.

`run` is an agent as a user would write it: a loop that calls the model through `openai` and runs its tool calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from openai import OpenAI

from .calculator import calculator

if TYPE_CHECKING:
    from datasets import Dataset

# One client for all sessions: making a client takes ten times as long as a request.
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")
PRICES = {
    "lamp": 34, "chair": 57, "table": 89, "shelf": 46, "stool": 23, "mirror": 68, "carpet": 75, "clock": 19,
    "vase": 28, "sofa": 97, "desk": 83, "bench": 62,
}  # fmt: skip
MOST_TURNS = 4


def price(item: str) -> str:
    """Looks up a price."""
    return str(PRICES[item])


TOOLS: dict[str, Callable[..., str]] = {"price": price, "calculator": calculator}


def _schema(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS: list[Any] = [_schema("price", "Looks up a price.", "item"), _schema("calculator", "Calculates.", "expression")]


def _example(order: str, tool: str, arguments: dict[str, str], answer: str, *ending: str) -> list[dict[str, Any]]:
    call = {"id": f"call_{tool}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return [
        {"role": "user", "content": order},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": answer},
        *({"role": "assistant", "content": text} for text in ending),
    ]


SYSTEM = {"role": "system", "content": "Use the tools."}
OF_PRICES = [
    SYSTEM,
    *_example("How much is a rug?", "price", {"item": "rug"}, "41"),
    *_example("How much is a bed?", "price", {"item": "bed"}, "28"),
]
OF_TOTALS = [
    SYSTEM,
    *_example("What is 31 * 41?", "calculator", {"expression": "31 * 41"}, "1271", "1271"),
    *_example("What is 76 * 28?", "calculator", {"expression": "76 * 28"}, "2128", "2128"),
]


def orders(size: int = 2048, seed: int = 0) -> Dataset:
    """Make orders of several pieces of one item: columns ``item``, ``count`` and ``answer`` (the total as text)."""
    from datasets import Dataset

    if size < 1:
        raise ValueError(f"orders: size is {size}, but must be at least 1: raise it.")
    draw, rows = random.Random(seed), []
    for _ in range(size):
        item, count = draw.choice(sorted(PRICES)), draw.randint(12, 98)
        rows.append({"item": item, "count": count, "answer": str(count * PRICES[item])})
    return Dataset.from_list(rows)


def run(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Serve one order: the model looks up the price, then calculates the total in a new conversation.
    Return the reward: 1 if the model answers with the right total. Otherwise the reward is 0.4 if a tool returned the
    right total, else 0.2 if a tool returned the right price, else 0."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*OF_PRICES, {"role": "user", "content": f"How much is a {row['item']}?"}]
    found, reward = "", 0.0
    for _ in range(MOST_TURNS):
        reply = client.chat.completions.create(model=model, messages=messages, tools=SCHEMAS).choices[0].message
        if not reply.tool_calls:
            return 1.0 if found and (reply.content or "").strip() == row["answer"] else reward
        call: Any = reply.tool_calls[0]
        try:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        except Exception as error:  # A tool may raise any error, because the model writes its arguments.
            result = f"error: {type(error).__name__}"
        if call.function.name == "price" and not found and result == price(row["item"]):
            found, reward = result, 0.2
            messages = [*OF_TOTALS, {"role": "user", "content": f"What is {row['count']} * {found}?"}]
            continue
        if found and result == row["answer"]:
            reward = 0.4
        messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": result}]
    return reward

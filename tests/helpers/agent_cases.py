"""Agents as users write them, for tests and the scripts they start."""

from __future__ import annotations

import json
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def client(base_url: str, api_key: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def answered(call: Any) -> str:
    """What the tool says to a call."""
    try:
        arguments = json.loads(call.function.arguments)
        return str(arguments["a"] + arguments["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def calculator(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """A plain loop with a tool: at most three turns; the reward is the number of calls."""
    asked: list[Any] = [{"role": "user", "content": row["question"]}]
    calls = 0
    with client(base_url, api_key) as openai:
        for _ in range(3):
            reply = openai.chat.completions.create(model=model, messages=asked, tools=TOOLS, max_tokens=80)
            message = reply.choices[0].message
            asked.append(message)
            for call in message.tool_calls or ():
                calls += 1
                asked.append({"role": "tool", "tool_call_id": call.id, "content": answered(call)})
            if not message.tool_calls:
                break
    return float(calls)


def compacting(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """Asks twice, then again with a shorter context, and leaves the reward to others."""
    asked: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": row["question"]}]
    with client(base_url, api_key) as openai:
        for question in ("and then?", "so?"):
            reply = openai.chat.completions.create(model=model, messages=asked, max_tokens=6)
            asked += [reply.choices[0].message, {"role": "user", "content": question}]
        short = [asked[0], {"role": "user", "content": "in short"}, *asked[-2:]]
        openai.chat.completions.create(model=model, messages=short, max_tokens=6)

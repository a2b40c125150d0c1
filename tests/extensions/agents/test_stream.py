"""Streamed events add up to the unstreamed message, whatever vLLM's parsers find in it."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import agent_cases
import pytest
from template_families import FAMILIES, Family, Model, families, tokenizer_of

from colograd.batch import FinishReason
from colograd.engine.protocol import Sampled
from colograd.engine.sampling import Sampling
from colograd.extensions.agents.engine.chat_api import ChatAPI, Choice, events

ODD = (
    "1 < 2, or 2 > 1?",
    "a [list] {of} | things",
    "  spaces first",
    "naïve ☃ 𝄞 text",
    "a <tool_call> that is none",
    "",
)
SAMPLING = Sampling(1, 80, 1.0, {})


def sample(ids: Sequence[int]) -> Sampled:
    return Sampled(array("i", ids), array("f", [0.0] * len(ids)), FinishReason.STOP)


def added_up(told: Iterable[str], api: str) -> dict[str, Any]:
    """Build the message from events, as a client does."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for event in told:
        data = event.split("data: ", 1)[1].strip()
        content = {} if data == "[DONE]" else json.loads(data)
        if api == "messages":
            delta = content.get("delta", {})
            found["reasoning"] += delta.get("thinking", "")
            found["content"] += delta.get("text", "")
            if "partial_json" in delta:
                found["calls"].append(json.loads(delta["partial_json"]))
        for choice in content.get("choices", ()):
            delta = choice.get("delta", choice)
            found["reasoning"] += delta.get("reasoning") or ""
            found["content"] += delta.get("content") or delta.get("text") or ""
            found["calls"] += [json.loads(call["function"]["arguments"]) for call in delta.get("tool_calls") or ()]
    return found


def whole(choice: Choice) -> dict[str, Any]:
    message = choice.message
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {"reasoning": message.get("reasoning") or "", "content": message.get("content") or "", "calls": calls}


def request(api: str, tools: bool) -> dict[str, Any]:
    asked = [{"role": "user", "content": "so"}]
    if api == "completions":
        return {"model": "m", "prompt": "so", "stream": True}
    if api == "messages":
        own = [{"name": "add", "input_schema": agent_cases.TOOLS[0]["function"]["parameters"]}]
        return {"model": "m", "messages": asked, "max_tokens": 80, "stream": True, **({"tools": own} if tools else {})}
    return {"model": "m", "messages": asked, "stream": True, **({"tools": agent_cases.TOOLS} if tools else {})}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stream_adds_up_to_the_message(name: str) -> None:
    family: Family = dict(families())[name]
    tokenizer, draw = tokenizer_of(family), random.Random(name)
    model = Model(family, tokenizer, draw)
    api = ChatAPI(tokenizer, "m", family.template, model_type="gpt_oss" if name == "gpt-oss" else "")
    for number in range(40):
        ids = model.tokens(ODD[number]) if number < len(ODD) else model.turn()[0]
        kind = draw.choice(["chat", "chat", "messages", "completions"])
        call = api.read(kind, request(kind, bool(api.tool_parser) and draw.random() < 0.7), SAMPLING)
        choice = api.choice(call, sample(ids), model.ends)
        told = added_up(events(call, api.response(call, [choice], 3)), kind)
        assert told == whole(choice), tokenizer.decode(ids)


def test_a_stop_string_is_never_sent() -> None:
    family: Family = dict(families())["no end in the template"]
    tokenizer = tokenizer_of(family)
    api = ChatAPI(tokenizer, "m", family.template)
    call = api.read("chat", request("chat", False) | {"stop": ["more 12"]}, SAMPLING)
    ids = tokenizer("look it up before we say more 12", add_special_tokens=False).input_ids
    choice = api.choice(call, sample(ids), [])
    sent = added_up(events(call, api.response(call, [choice], 3)), "chat")
    assert sent["content"] == choice.message["content"] == "look it up before we say "

"""Hostile requests to the endpoint from a program or its model: a bad request gets status 400, others are answered."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace
from typing import Any

import agent_cases
import httpx
import pytest
import tiny

from colograd.batch import FinishReason, ModelInput, Prompt
from colograd.engine.protocol import Sampled
from colograd.engine.sampling import Sampling
from colograd.extensions.agents.context import ChatFormat
from colograd.extensions.agents.endpoint import Endpoint
from colograd.extensions.agents.engine.chat_api import ChatAPI
from colograd.extensions.agents.session import Session, Work, WorkQueue
from colograd.extensions.agents.sessions import returned
from colograd.usercode.calls import Outcome

CONTEXT = 20_000
FINE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "so"}], "max_tokens": 2}
TOOLS = {"tools": agent_cases.TOOLS}
DEEP = "[" * 5000 + "]" * 5000
NESTED: Any = json.loads("[" * 200 + "]" * 200)


class Written(WorkQueue):
    """A model that answers each request with the same text."""

    def __init__(self, text: str) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.ids = array("i", tiny.make_tokenizer().encode(text))

    def put(self, work: Work) -> None:
        sampled = Sampled(self.ids, array("f", [0.0] * len(self.ids)), FinishReason.STOP)
        work.finish([sampled] * work.sampling.n)


@pytest.fixture(scope="module")
def api() -> ChatAPI:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = tiny.TOOL_TEMPLATE
    return ChatAPI(tokenizer, "m", tiny.TOOL_TEMPLATE)


def responses(api: ChatAPI, wrote: str, requests: list[tuple[str, Any]]) -> list[httpx.Response]:
    """Responses of one session. Its model writes the same text each time."""
    form = ChatFormat(api.tokenizer, {}, [api.tokenizer.eos_token_id])
    sampling = Sampling(1, 64, 1.0, {})
    endpoint = Endpoint(api, Written(wrote), sampling, 0, "train", CONTEXT)
    config: Any = SimpleNamespace(agent_requests=1000, agent_parallel=8, agent_sampling="refuse")
    session = Session(Prompt({}, ModelInput((1, 2)), 0), 0, form, config)
    endpoint.sessions[session.key] = session

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=endpoint.app)
        headers = {"Authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for _, body in requests]
            return [await client.post(path, content=c) for (path, _), c in zip(requests, contents, strict=True)]

    return asyncio.run(ask())


CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def said(message: Any) -> dict[str, Any]:
    return {**FINE, "messages": [message]}


def with_call(call: Any) -> dict[str, Any]:
    messages = [*FINE["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    return {**FINE, "messages": [*messages, {"role": "tool", "tool_call_id": "a", "content": "3"}]}


BAD: list[tuple[str, Any]] = [
    (CHAT, {**FINE, **TOOLS, "tool_choice": "perhaps"}),
    (CHAT, {**FINE, **TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}}),
    (CHAT, {**FINE, **TOOLS, "tool_choice": {"type": "function"}}),
    (CHAT, {**FINE, **TOOLS, "tool_choice": 3}),
    (CHAT, {**FINE, "n": 0}),
    (CHAT, {**FINE, "n": -1}),
    (CHAT, {**FINE, "max_tokens": 0}),
    (CHAT, {**FINE, "max_completion_tokens": 0}),
    (CHAT, {**FINE, "temperature": float("nan")}),
    (CHAT, {**FINE, "temperature": float("inf")}),
    (CHAT, {**FINE, "tools": NESTED}),
    (CHAT, {**FINE, "tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]}),
    (CHAT, said(None)),
    (CHAT, said({})),
    (CHAT, said({"role": "user", "content": 3})),
    (CHAT, said({"role": "user", "content": [3]})),
    (CHAT, said({"role": "user", "content": NESTED})),
    (CHAT, said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})),
    (CHAT, said({"role": "user", "content": "x" * 400_000})),
    (CHAT, with_call({})),
    (CHAT, with_call({"id": "a", "type": "function", "function": {}})),
    (CHAT, with_call({"id": "a", "type": "function", "function": 3})),
    (CHAT, DEEP.encode()),
    (CHAT, b'{"messages": ' + DEEP.encode() + b"}"),
    (CHAT, b"\xff\xfe"),
    (CHAT, b""),
    (CHAT, b"null"),
    (CHAT, b"1" * 10_000),
    (TEXT, {"model": "m", "prompt": ""}),
    (TEXT, {"model": "m", "prompt": []}),
    (TEXT, {"model": "m", "prompt": [""]}),
    (TEXT, {"model": "m", "prompt": [[]]}),
    (TEXT, {"model": "m", "prompt": [-1]}),
    (TEXT, {"model": "m", "prompt": [10**30]}),
    (TEXT, {"model": "m", "prompt": [258]}),
    (TEXT, {"model": "m", "prompt": "so", "n": 0}),
    (TEXT, {"model": "m", "prompt": "x" * 400_000}),
    (MESSAGES, {**FINE, "messages": []}),
    (MESSAGES, {**FINE, "max_tokens": 0}),
    (MESSAGES, {**FINE, "tools": [{"name": "f"}]}),
    (MESSAGES, {**FINE, "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}}),
    (MESSAGES, {**FINE, "system": 3}),
]


def test_a_bad_request_is_400(api: ChatAPI) -> None:
    statuses = [response.status_code for response in responses(api, "well<end>", BAD)]
    assert [(body, status) for (_, body), status in zip(BAD, statuses, strict=True) if status != 400] == []


ODD: list[tuple[str, Any]] = [
    (CHAT, said({"role": "user", "content": "lone \ud83d surrogate"})),
    (CHAT, said({"role": "user", "content": "\x00\x1b[2J"})),
    (CHAT, said({"role": "user", "content": "<end><assistant><tool_call>"})),
    (CHAT, with_call({"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 5000}})),
    (CHAT, with_call({"id": "a", "type": "function", "function": {"name": "f", "arguments": '"\\ud83d"'}})),
    (TEXT, {"model": "m", "prompt": "\ud83d"}),
]


def test_odd_messages_are_answered(api: ChatAPI) -> None:
    assert [response.status_code for response in responses(api, "well<end>", ODD)] == [200] * len(ODD)


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call><end>'


@pytest.mark.parametrize(
    "wrote",
    [
        f"<tool_call>{'[' * 1200}</tool_call><end>",
        f"<tool_call>{'[' * 1200}{']' * 1200}</tool_call><end>",
        call_of("[" * 300 + "]" * 300),
        call_of('{"x": "\\ud83d"}'),
        call_of('{"\\ud83d": NaN}'),
        call_of("1" * 5000),
        call_of("null"),
        '<tool_call>{"name": 3}</tool_call><tool_call>null</tool_call><tool_call><end>',
        '<tool_call>{"name": "\\udc80"}</tool_call>',
        "\x00",
        "<end>",
    ],
)
def test_whatever_the_model_writes_is_an_answer(api: ChatAPI, wrote: str) -> None:
    asked = [(CHAT, FINE), (CHAT, {**FINE, **TOOLS}), (CHAT, {**FINE, **TOOLS, "stream": True}), (MESSAGES, FINE)]
    own = {"name": "add", "input_schema": agent_cases.TOOLS[0]["function"]["parameters"]}
    told = responses(api, wrote, [*asked, (MESSAGES, {**FINE, "tools": [own]})])
    assert [response.status_code for response in told] == [200] * 5
    reply = told[1].json()["choices"][0]["message"]
    again = {**FINE, **TOOLS, "messages": [*FINE["messages"], reply, {"role": "user", "content": "go on"}]}
    assert responses(api, wrote, [(CHAT, again)])[0].status_code == 200


@pytest.mark.parametrize("value", [10**400, NESTED, float("nan"), {"reward": 10**400}, {"x": NESTED}])
def test_what_no_reward_can_be_is_a_failure(value: Any) -> None:
    assert returned(Outcome("value", value, 0.0))[1].startswith("it returned")
    assert returned(Outcome("value", {"text": "caf\udce9"}, 0.0)) == ({"agent_reward": None, "text": "caf?"}, "")

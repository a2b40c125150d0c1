"""`Stream`: server-sent events of an answer while its tokens are sampled, in the forms of OpenAI and Anthropic.

The events add up to the message of a response without streaming. So text is held back while a parser may still find a
tool call or reasoning in the text, or a stop string may begin in the text. The last events send such text and calls.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .chat_api import Call, ChatAPI, Choice

OFTEN = 16  # a text is parsed again after growing by 1/16, because parsing it for each token takes n² time


class Stream:
    """The server-sent events of one streamed request."""

    def __init__(self, api: ChatAPI, call: Call, prompt_tokens: int) -> None:
        self.api, self.call, self.prompt_tokens = api, call, prompt_tokens
        self._sent = {"reasoning": "", "content": ""}
        self._read = 0  # number of tokens when the text was last parsed
        forms: dict[str, type[_Chat | _Anthropic]]
        forms = {"chat": _Chat, "completions": _Completions, "messages": _Anthropic}
        self._form = forms[call.api](api.model, prompt_tokens)
        self.begin = self._form.begin

    def more(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield events for the new text of a request with a single answer. ``ids`` are the answer's tokens so far."""
        if len(ids) < self._read + max(1, self._read // OFTEN):
            return
        self._read = len(ids)
        for name, text in self.api.readable(self.call, ids).items():
            if new := self._new(name, text):
                yield from self._form.delta(0, name, new)

    def _new(self, name: str, text: str) -> str:
        sent = self._sent[name]
        if not text.startswith(sent):
            return ""
        self._sent[name] = text
        return text[len(sent) :]

    def end(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Yield the last events: the unsent text of a single answer, or the whole texts of several answers."""
        whole = self.api.response(self.call, choices, self.prompt_tokens)
        for index, choice in enumerate(choices):
            for name in ("reasoning", "content"):
                text = choice.message.get(name) or ""
                if new := self._new(name, text) if len(choices) == 1 else text:
                    yield from self._form.delta(index, name, new)
            yield from self._form.end_of(index, whole, choice)
        options = self.call.request.stream_options
        yield from self._form.end(whole, options is not None and bool(options.include_usage))


class _Chat:
    """Events in the form of OpenAI's chat completions."""

    kind, prefix = "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._shared = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._begun: set[int] = set()

    def _event(self, choices: list[dict[str, Any]], **further: Any) -> str:
        return f"data: {json.dumps({**self._shared, 'object': self.kind, 'choices': choices, **further})}\n\n"

    def begin(self) -> Iterator[str]:
        yield from self._begin(0)

    def _begin(self, index: int) -> Iterator[str]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._part(index, {"role": "assistant", "content": ""})

    def _part(self, index: int, delta: dict[str, Any], **further: Any) -> str:
        return self._event([{"index": index, "delta": delta, "finish_reason": None, **further}])

    def delta(self, index: int, name: str, text: str) -> Iterator[str]:
        yield from self._begin(index)
        yield self._part(index, {name: text})

    def end_of(self, index: int, whole: Mapping[str, Any], choice: Choice) -> Iterator[str]:
        yield from self._begin(index)
        for number, call in enumerate(choice.message.get("tool_calls") or ()):
            yield self._part(index, {"tool_calls": [{**call, "index": number}]})
        own = whole["choices"][index]
        end = {name: own[name] for name in ("finish_reason", "stop_reason", "logprobs")}
        yield self._part(index, {}, **end)

    def end(self, whole: Mapping[str, Any], with_usage: bool) -> Iterator[str]:
        if with_usage:
            yield self._event([], usage=whole["usage"])
        yield "data: [DONE]\n\n"


class _Completions(_Chat):
    """Events in the form of OpenAI's completions."""

    kind, prefix = "text_completion", "cmpl"

    def _begin(self, index: int) -> Iterator[str]:
        yield from ()

    def delta(self, index: int, name: str, text: str) -> Iterator[str]:
        yield self._event([{"index": index, "text": text, "finish_reason": None, "logprobs": None}])

    def end_of(self, index: int, whole: Mapping[str, Any], choice: Choice) -> Iterator[str]:
        yield self._event([{**whole["choices"][index], "text": ""}])


class _Anthropic:
    """Events in the form of Anthropic's messages API, where a request has one answer."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }  # fmt: skip
        self._block, self._open = -1, ""  # Index of the last content block, and the block's type while open.

    @staticmethod
    def _event(kind: str, **content: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"

    def begin(self) -> Iterator[str]:
        yield self._event("message_start", message=self._message)

    def _start(self, kind: str, **block: Any) -> Iterator[str]:
        yield from self._stop()
        self._block, self._open = self._block + 1, kind
        yield self._event("content_block_start", index=self._block, content_block={"type": kind, **block})

    def _more(self, **delta: Any) -> str:
        return self._event("content_block_delta", index=self._block, delta=delta)

    def _stop(self) -> Iterator[str]:
        if self._open == "thinking":
            yield self._more(type="signature_delta", signature=uuid.uuid4().hex)
        if self._open:
            yield self._event("content_block_stop", index=self._block)
        self._open = ""

    def delta(self, index: int, name: str, text: str) -> Iterator[str]:
        if name == "reasoning":
            if self._open != "thinking":
                yield from self._start("thinking", thinking="", signature="")
            yield self._more(type="thinking_delta", thinking=text)
            return
        if self._open != "text":
            yield from self._start("text", text="")
        yield self._more(type="text_delta", text=text)

    def end_of(self, index: int, whole: Mapping[str, Any], choice: Choice) -> Iterator[str]:
        if self._block < 0 and whole["content"][0]["type"] == "text":  # the message is one empty text block
            yield from self._start("text", text="")
        for block in whole["content"]:
            if block["type"] == "tool_use":
                yield from self._start("tool_use", **{**block, "input": {}})
                yield self._more(type="input_json_delta", partial_json=json.dumps(block["input"]))
        yield from self._stop()

    def end(self, whole: Mapping[str, Any], with_usage: bool) -> Iterator[str]:
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield self._event("message_delta", delta=delta, usage=whole["usage"])
        yield self._event("message_stop")

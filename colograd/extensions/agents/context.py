"""`SessionContexts`: converts a request's messages to token ids for the model, without changing sampled ids.

The chat template writes the messages as text. If the text begins with the session's text up to an earlier reply, the
request continues the exact ids up to that reply, and only the remaining text is tokenised. If the template or the agent
has rewritten earlier messages (dropped reasoning, a compacted context), all text behind the last unchanged reply is
tokenised.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...usercode.untrusted import parse_json
from .engine.chat_api import BadRequest

PROBE = "colograd-probe-7f3a"  # Content of a test message, which no template contains.
REASONING = ("reasoning", "reasoning_content", "thinking")  # Names of a message's field with reasoning in templates.


class TooLong(ValueError):
    """A request's prompt is longer than the model's context. The error's text is the length in characters or tokens."""


@dataclass(frozen=True, slots=True)
class Context:
    """The model's input for one request, as token ids, text and messages."""

    ids: list[int]
    text: str  # Text that the template wrote.
    messages: list[dict[str, Any]]  # Messages in the template's format.
    arguments: dict[str, Any]  # Arguments of the chat template, such as enable_thinking.
    after: int | None  # Index in `SessionContexts.turns` of the turn that the ids continue, or None.


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: a reply of the model, and the conversation up to the reply."""

    # Texts of the conversation with the reply: as read and sampled, and as the template writes the messages. A request
    # can continue this turn only if the request's text begins with one of these texts.
    texts: tuple[str, ...]
    ids: list[int]  # Ids of the conversation with the reply, as read and sampled.
    key: str  # Key of the reply, see `_key`.
    place: int  # Index of the reply among the conversation's messages.


class ChatFormat:
    """Writes and tokenises messages with a tokenizer's chat template. All sessions of a run share one object.

    Args:
        arguments: arguments of the chat template, such as ``enable_thinking``. A request's arguments override them.
        ends: tokens that end a message of the model.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], ends: Sequence[int]) -> None:
        self.tokenizer, self.arguments, self.ends = tokenizer, dict(arguments), frozenset(ends)
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template, which an agent needs: set chat_template_path.")
        asked = [{"role": "user", "content": "asked"}]
        answered = [*asked, {"role": "assistant", "content": PROBE}]
        try:
            self.write(asked, {})
            text = self.write(answered, {}, begins=False)
        except BadRequest as error:
            raise ValueError(f"an agent needs another chat template (set chat_template_path): {error}") from None
        if PROBE not in text:
            whose = tokenizer.name_or_path
            raise ValueError(f"{whose}'s chat template writes no messages of an assistant: set chat_template_path.")
        self.end = text[text.index(PROBE) + len(PROBE) :]  # Text that the template writes behind a content.
        self.end_texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in self.ends}

    def write(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any], begins: bool = True) -> str:
        """Return the messages as text. If ``begins``, the text ends with the beginning of the model's next message.
        Raise BadRequest if the template can't write the messages."""
        merged = self.arguments | {name: value for name, value in arguments.items() if value is not None}
        try:
            apply = functools.partial(self.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=begins)
            return str(apply([*messages], **merged))
        except Exception as error:  # a template may raise anything for messages that it wasn't made for
            whose, problem = self.tokenizer.name_or_path, f"{type(error).__name__}: {error}"
            raise BadRequest(f"the chat template of {whose} can't write these messages: {problem}") from None

    def encode(self, text: str, behind: int | None = None) -> list[int]:
        """Tokenise a text that follows the token ``behind``. Some tokenizers encode the start of a text differently."""
        if not text:
            return []
        if behind in self.end_texts:
            before: list[int] = self.tokenizer.encode(self.end_texts[behind], add_special_tokens=False)
            whole: list[int] = self.tokenizer.encode(self.end_texts[behind] + text, add_special_tokens=False)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


class SessionContexts:
    """Converts one session's requests to contexts, and records the model's replies as turns."""

    def __init__(self, form: ChatFormat) -> None:
        self.form = form
        self.turns: list[Turn | None] = []  # Turns of all replies. None: no request can continue the turn.

    def context(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], most: int | None = None
    ) -> Context:
        """Return the context for a request's messages. Raise BadRequest if the template can't write the messages, or
        TooLong if the text has more than ``most`` characters."""
        written = [as_written(message) for message in messages]
        text = self.form.write(written, arguments)
        if most is not None and len(text) > most:
            raise TooLong(f"{len(text)} characters")
        keys = [_key(message) if message.get("role") == "assistant" else "" for message in written]
        known = [
            (len(begun), number)
            for number, turn in enumerate(self.turns)
            if turn is not None
            and turn.place < len(keys)
            and keys[turn.place] == turn.key  # excludes a reply that only begins like the request's message
            for begun in turn.texts
            if text.startswith(begun)
        ]
        at, after = max(known, default=(0, None))
        ids: list[int] = []
        if after is not None:
            turn = self.turns[after]
            assert turn is not None
            ids = list(turn.ids)
            # In some templates the token that ends a reply also begins the next message. Don't repeat it.
            end = self.form.end_texts.get(ids[-1], "")
            if end and not text.endswith(end, 0, at) and text.startswith(end, at):
                at += len(end)
        ids += self.form.encode(text[at:], ids[-1] if ids else None)
        return Context(ids, text, written, dict(arguments), after)

    def add(self, context: Context | None, wrote: Sequence[int], reply: Mapping[str, Any], whole: bool = True) -> None:
        """Record a reply with the sampled ids ``wrote`` as a turn.

        Args:
            context: the context that was answered. None: the request had no messages, and nothing continues it.
            whole: whether the reply contains all sampled text. False means that it was cut at a stop string.
        """
        self.turns.append(None)
        if context is None or not wrote:
            return
        message, key = as_written(reply), _key(reply)
        try:
            text = self.form.write([*context.messages, message], context.arguments, begins=False)
        except BadRequest:  # E.g. the template requires tools' answers behind calls.
            return
        decode = functools.partial(self.form.tokenizer.decode, skip_special_tokens=False)
        texts = [context.text + str(decode([*wrote], clean_up_tokenization_spaces=False))]
        if whole:
            # Cut the template's text where the ids end. If an end token was sampled, that is behind the end token.
            # Otherwise it is behind the message's content, before the text that the template writes there.
            stop = len(text) - len(self.form.end) if text.endswith(self.form.end) else len(text)
            end = self.form.end_texts.get(wrote[-1], "")
            if end and (at := text.rfind(end, min(stop, len(text) - 1))) >= 0:
                stop = at + len(end)
            texts.append(text[:stop])
        self.turns[-1] = Turn(tuple(texts), [*context.ids, *wrote], key, len(context.messages))


def as_written(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the API in the format of chat templates. Content parts become one text, JSON arguments
    of calls become objects, reasoning is stored under each name in `REASONING`, nulls are dropped."""
    found = {name: value for name, value in message.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    found.setdefault("content", "")
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [{**call, "function": dict(call["function"])} for call in calls]
        for call in found["tool_calls"]:
            arguments = call["function"].get("arguments") or {}
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError):
                    arguments = parse_json(arguments) if arguments.strip() else {}
            call["function"]["arguments"] = arguments
    else:
        found.pop("tool_calls", None)
    reasoning = next((found[name] for name in REASONING if found.get(name)), None)
    for name in REASONING:
        found.pop(name, None)
        if reasoning is not None:
            found[name] = reasoning
    return found


def _key(message: Mapping[str, Any]) -> str:
    """Return a message's key, made from its content and calls. A reply and the program's copy of it have equal keys."""
    written = as_written(message)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in written.get("tool_calls", ())]
    return json.dumps([str(written["content"]).strip(), calls], sort_keys=True, default=str)

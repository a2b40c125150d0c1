"""`SessionContexts`: converts a request's messages to token ids for the model, without changing sampled ids.

The chat template writes the messages as text. If the text begins with an earlier conversation of the session, the
request keeps that conversation's exact ids. Only the remaining text is tokenised.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...usercode.untrusted import parse_json
from .engine.chat_api import BadRequest

PROBE = "colograd-probe-7f3a"
REASONING = ("reasoning", "reasoning_content", "thinking")  # Templates read a message's reasoning under these names.


class TooLong(ValueError):
    """A prompt leaves no room in the model's context. The error's text is the prompt's length, e.g. "5000 tokens"."""


@dataclass(frozen=True, slots=True)
class Context:
    ids: list[int]
    text: str
    messages: list[dict[str, Any]]  # The request's messages, as the chat template reads them.
    arguments: dict[str, Any]  # Arguments of the chat template.
    after: int | None  # Index of the earlier turn that the ids continue, or None.


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply of the model and the conversation that ends with it."""

    # The conversation as sampled, and possibly as the template writes it. A later request may begin with either text.
    texts: tuple[str, ...]
    ids: list[int]  # Token ids of the conversation, as the model read and sampled them.
    key: str
    place: int  # Index of the reply among the conversation's messages.


class ChatFormat:
    """Writes and tokenises messages with a chat template. ``ends`` are the tokens that end a message of the model."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], ends: Sequence[int]) -> None:
        self.tokenizer, self.arguments, self.ends = tokenizer, dict(arguments), frozenset(ends)
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template, which an agent needs: set chat_template_path.")
        question = {"role": "user", "content": "question"}
        try:
            self.write([question], {})
            text = self.write([question, {"role": "assistant", "content": PROBE}], {}, begins=False)
        except BadRequest as error:
            raise ValueError(f"an agent needs another chat template (set chat_template_path): {error}") from None
        if PROBE not in text:
            whose = tokenizer.name_or_path
            raise ValueError(f"{whose}'s chat template writes no messages of an assistant: set chat_template_path.")
        self.end = text[text.index(PROBE) + len(PROBE) :]  # The template's text behind an assistant's content.
        self.end_texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in self.ends}

    def write(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any], begins: bool = True) -> str:
        """Return the messages as text. ``begins``: whether the beginning of the model's next message is added."""
        merged = self.arguments | {name: value for name, value in arguments.items() if value is not None}
        try:
            apply = functools.partial(self.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=begins)
            return str(apply([*messages], **merged))
        except Exception as error:  # A template may raise anything for messages that it wasn't made for.
            whose, problem = self.tokenizer.name_or_path, f"{type(error).__name__}: {error}"
            raise BadRequest(f"the chat template of {whose} can't write these messages: {problem}") from None

    def encode(self, text: str, behind: int | None = None) -> list[int]:
        """Tokenise a text that follows the end token ``behind``. Without this token, some tokenizers give other ids."""
        encode: Callable[[str], list[int]] = functools.partial(self.tokenizer.encode, add_special_tokens=False)
        if text and behind in self.end_texts:
            before, whole = encode(self.end_texts[behind]), encode(self.end_texts[behind] + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return encode(text) if text else []


class SessionContexts:
    def __init__(self, form: ChatFormat) -> None:
        self.form = form
        self.turns: list[Turn | None] = []  # One entry per reply. None: later requests can't continue the reply.

    def context(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], most: int | None = None
    ) -> Context:
        """Return a request's context. Raise TooLong if its text has more than ``most`` characters."""
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
            and keys[turn.place] == turn.key  # The message must equal the reply, not only begin with it.
            for begun in turn.texts
            if text.startswith(begun)
        ]
        at, after = max(known, default=(0, None))
        ids: list[int] = []
        if after is not None:
            turn = self.turns[after]
            assert turn is not None
            ids = list(turn.ids)
            # In some templates the token that ends a reply also begins the next message. `ids` already has this token.
            end = self.form.end_texts.get(ids[-1], "")
            if end and not text.endswith(end, 0, at) and text.startswith(end, at):
                at += len(end)
        ids += self.form.encode(text[at:], ids[-1] if ids else None)
        return Context(ids, text, written, dict(arguments), after)

    def add(self, context: Context | None, wrote: Sequence[int], reply: Mapping[str, Any], whole: bool = True) -> None:
        """Record a reply with the sampled ids ``wrote``. ``whole`` is false if a stop string cut the reply's text."""
        self.turns.append(None)
        if context is None or not wrote:
            return
        message, key = as_written(reply), _key(reply)
        try:
            text = self.form.write([*context.messages, message], context.arguments, begins=False)
        except BadRequest:  # Some templates can't write a tool call that has no answer yet.
            return
        decode = functools.partial(self.form.tokenizer.decode, skip_special_tokens=False)
        texts = [context.text + str(decode([*wrote], clean_up_tokenization_spaces=False))]
        if whole:
            # Cut the template's text where the sampled ids end: behind an end token, or behind the message's content.
            stop = len(text) - len(self.form.end) if text.endswith(self.form.end) else len(text)
            end = self.form.end_texts.get(wrote[-1], "")
            if end and (at := text.rfind(end, min(stop, len(text) - 1))) >= 0:
                stop = at + len(end)
            texts.append(text[:stop])
        self.turns[-1] = Turn(tuple(texts), [*context.ids, *wrote], key, len(context.messages))


def as_written(message: Mapping[str, Any]) -> dict[str, Any]:
    written = {name: value for name, value in message.items() if value is not None}
    content = written.setdefault("content", "")
    if isinstance(content, list):
        written["content"] = "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    if calls := written.get("tool_calls"):
        written["tool_calls"] = [{**call, "function": dict(call["function"])} for call in calls]
        for call in written["tool_calls"]:
            arguments = call["function"].get("arguments") or {}
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError):
                    arguments = parse_json(arguments) if arguments.strip() else {}
            call["function"]["arguments"] = arguments
    else:
        written.pop("tool_calls", None)
    reasonings = [value for name in REASONING if (value := written.pop(name, None))]
    return written | (dict.fromkeys(REASONING, reasonings[0]) if reasonings else {})


def _key(message: Mapping[str, Any]) -> str:
    """Return a text that is equal for a reply and for the program's copy of the reply in a later request."""
    written = as_written(message)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in written.get("tool_calls", ())]
    return json.dumps([str(written["content"]).strip(), calls], sort_keys=True, default=str)

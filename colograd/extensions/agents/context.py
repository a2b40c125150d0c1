"""`SessionContexts`: converts a request's messages to token ids for the model, without changing sampled ids.

The chat template writes the messages as text. If the text begins with the session's text up to an earlier reply, the
request continues the exact ids up to that reply, and only the remaining text is tokenised. If the template or the agent
has rewritten earlier messages (dropped reasoning, a compacted context), nothing is continued. In text that must be
tokenised, parts of earlier replies (of `DISTINCT` or more characters) keep their sampled ids.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...usercode.untrusted import parse_json

PROBE = "colograd-probe-7f3a"  # Content of a test message, which no template contains.
DISTINCT = 8  # Minimum characters of a reply's part to search for, because a shorter text may occur anywhere.
REASONING = ("reasoning", "reasoning_content", "thinking")  # Names of a message's field with reasoning in templates.


class UnreadableMessages(ValueError):
    """The chat template can't write a request's messages."""


class TooLong(UnreadableMessages):
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
    wrote: list[int]  # Ids of the reply, at the end of `ids`.
    message: dict[str, Any]  # Reply as a message.
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
        except UnreadableMessages as error:
            raise ValueError(f"an agent needs another chat template (set chat_template_path): {error}") from None
        if PROBE not in text:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} doesn't write an assistant's message: set "
                "chat_template_path."
            )
        self.end = text[text.index(PROBE) + len(PROBE) :]  # What the template writes behind a message's content.
        self.end_texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in self.ends}

    def write(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any], begins: bool = True) -> str:
        """Return the messages as text. If ``begins``, the text ends with the beginning of the model's next message.
        Raise UnreadableMessages if the template can't write the messages."""
        merged = self.arguments | {name: value for name, value in arguments.items() if value is not None}
        try:
            apply = functools.partial(self.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=begins)
            return str(apply([*messages], **merged))
        except Exception as error:  # a template may raise anything for messages that it wasn't made for
            whose, problem = self.tokenizer.name_or_path, f"{type(error).__name__}: {error}"
            raise UnreadableMessages(f"the chat template of {whose} can't write these messages: {problem}") from None

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

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))


class SessionContexts:
    """Converts one session's requests to contexts, and records the model's replies as turns."""

    def __init__(self, form: ChatFormat) -> None:
        self.form = form
        self.turns: list[Turn | None] = []  # Turns of all replies. None: no request can continue the turn.
        self._by_key: dict[str, list[Turn]] = {}  # Turns by the key of their replies, oldest first.

    def context(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], most: int | None = None
    ) -> Context:
        """Return the context for a request's messages. Raise UnreadableMessages if the template can't write the
        messages, or if the text has more than ``most`` characters."""
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
        messages_before = 0
        if after is not None:
            turn = self.turns[after]
            assert turn is not None
            ids, messages_before = list(turn.ids), turn.place + 1
            # In some templates the token that ends a reply also begins the next message. Don't repeat it.
            end = self.form.end_texts.get(ids[-1], "")
            if end and not text.endswith(end, 0, at) and text.startswith(end, at):
                at += len(end)
        for piece in self._pieces(written, messages_before, text, at):
            ids += piece if isinstance(piece, list) else self.form.encode(piece, ids[-1] if ids else None)
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
        except UnreadableMessages:  # E.g. the template requires tools' answers behind calls.
            return
        texts = [context.text + self.form.decode(wrote)]
        if whole:
            # The ids end behind the sampled end token, or without an end token before the template's end of a message.
            stop = len(text) - len(self.form.end) if text.endswith(self.form.end) else len(text)
            end = self.form.end_texts.get(wrote[-1], "")
            if end and (at := text.rfind(end, min(stop, len(text) - 1))) >= 0:
                stop = at + len(end)
            texts.append(text[:stop])
        turn = Turn(tuple(texts), [*context.ids, *wrote], list(wrote), message, key, len(context.messages))
        self.turns[-1] = turn
        self._by_key.setdefault(key, []).append(turn)

    def _pieces(self, messages: Sequence[dict[str, Any]], known: int, text: str, at: int) -> Iterator[str | list[int]]:
        """Yield ``text[at:]`` in pieces: sampled ids where the text repeats model replies, and the texts between them.
        ``known`` is the number of messages that end before ``at``."""
        turns: dict[int, Turn] = {}  # Turns by message index. Of equal replies, the last message gets the newest turn.
        left = {key: [*equal] for key, equal in self._by_key.items()}
        for index in reversed(range(len(messages))):
            if messages[index].get("role") == "assistant" and (equal := left.get(_key(messages[index]))):
                turns[index] = equal.pop()
        behind = at  # Index in the text where the last message before `index` ends.
        for index in range(known, len(messages)):
            for first, ids in self._runs(turns[index], text, max(at, behind)) if index in turns else ():
                yield text[at:first]
                yield ids
                at = first + len(self.form.decode(ids))
            content = str(messages[index]["content"]).strip()
            if (first := text.find(content, behind)) >= 0:
                behind = first + len(content)
        yield text[at:]

    def _runs(self, turn: Turn, text: str, at: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (index in the text, sampled ids) for the parts (of `DISTINCT` or more characters) of a turn's
        reply that ``text[at:]`` still contains."""
        ids = turn.wrote[:-1] if turn.wrote[-1] in self.form.ends else turn.wrote
        said = self.form.decode(ids)
        for whole, of_whole in ((self.form.decode(turn.wrote), turn.wrote), (said, ids)):
            if len(whole) >= DISTINCT and (first := text.find(whole, at)) >= 0:
                yield first, of_whole
                return
        # Start of each token in the decoded text, then the text's end. All tokens of one character have the same start.
        places, known, start = [0], "", 0  # `known` is the text of whole characters, `start` the next token's index.
        for index in range(len(ids)):
            piece = self.form.decode(ids[start : index + 1])
            if not piece.endswith("\N{REPLACEMENT CHARACTER}"):
                known, start = known + piece, index + 1
            places.append(len(known))
        content = str(turn.message["content"]).strip()
        last = text.find(content, at) + len(content)
        read = 0  # Index in the reply's text behind the parts processed so far.
        for name in ("reasoning", "content", "tool_calls"):
            part = str(turn.message.get(name) or "").strip()
            if name == "tool_calls" and part:
                part = said[read:].strip()
            if len(part) < DISTINCT or (inside := said.find(part, read)) < 0:
                continue
            read = inside + len(part)
            first = text.find(part, at)
            if first < 0 or (name == "reasoning" and last - len(content) <= first and first + len(part) <= last):
                continue  # The template dropped the part, or `content` only contains its text.
            at = first + len(part)
            # Select the sampled tokens that lie completely in the part's text.
            low, high = bisect.bisect_left(places, inside), bisect.bisect_right(places, read) - 1
            start, end = (first + places[index] - inside for index in (low, high))
            if low < high and self.form.decode(ids[low:high]) == text[start:end]:
                yield start, ids[low:high]


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

"""From a request's messages to the token ids that the model reads: tokens in, tokens out.

The chat template writes the messages as text. Where that text begins as the session's text stood after an earlier turn,
the request goes on from that turn's very ids, and only what follows is tokenised. Where the template or the agent has
rewritten history (dropped reasoning, a compacted context), the context begins anew; what it keeps of the model's turns
still has the ids that were sampled.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..usercode.untrusted import parse_json

PROBE = "colograd-probe-7f3a"  # a content that no template has
MARK = "Zq7mark"  # likewise
DISTINCT = 8  # characters of a text that is looked for by itself: a shorter one may be anywhere
REASONING = ("reasoning", "reasoning_content", "thinking")  # the field's names in chat templates


class UnreadableMessages(ValueError):
    """The chat template can't write these messages."""


class TooLong(UnreadableMessages):
    """They have more characters than could have room as tokens."""


class Template(Protocol):
    """Of a tokenizer: its chat template, and texts to ids and back."""

    name_or_path: str
    all_special_ids: Sequence[int]

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, ids: list[int], **kwargs: Any) -> str: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a request's model reads."""

    ids: list[int]
    text: str  # that the template wrote
    messages: list[dict[str, Any]]  # as the template takes them
    arguments: dict[str, Any]  # of the template
    after: int | None  # the turn (its number) on whose ids it goes on; None: on none's


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply of the model, and the conversation up to it."""

    # How a request begins that goes on from it: the conversation as the template writes it, up to where the next
    # message begins to be tokenised; and the text that was read and written.
    texts: tuple[str, ...]
    ids: list[int]  # of the conversation so far, as the model read and wrote them
    wrote: list[int]  # the last of them: the reply's
    message: dict[str, Any]  # the reply
    key: str  # of that
    place: int  # of the reply among the conversation's messages


class ChatFormat:
    """A tokenizer's chat template: how turns begin and end in it. One for all sessions of a run.

    Args:
        arguments: of the template, such as ``enable_thinking``; a request's own come before them.
        ends: tokens that end a turn.

    Raises:
        ValueError: the tokenizer has no chat template, or one that writes no assistant's message.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], ends: Sequence[int]) -> None:
        self.tokenizer: Template = tokenizer
        self.arguments, self.ends = dict(arguments), frozenset(ends)
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("an agent needs a chat template, which the tokenizer hasn't: set chat_template_path.")
        asked = [{"role": "user", "content": "asked"}]
        answered = [*asked, {"role": "assistant", "content": PROBE}]
        try:
            self.write(asked, {})
            text = self.write(answered, {}, begins=False)
        except UnreadableMessages as error:
            raise ValueError(f"an agent needs a chat template that writes a conversation, but {error}") from None
        if PROBE not in text:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} doesn't write an assistant's message: set "
                "chat_template_path."
            )
        self.end = text[text.index(PROBE) + len(PROBE) :]  # what follows a turn's content
        self._end_texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in self.ends}

    def write(self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any], begins: bool = True) -> str:
        """The messages as text.

        Args:
            begins: the model's turn begins at its end.

        Raises:
            UnreadableMessages: the template can't write them.
        """
        given = self.arguments | {name: value for name, value in arguments.items() if value is not None}
        try:
            text = self.tokenizer.apply_chat_template(
                [*messages], tokenize=False, add_generation_prompt=begins, **given
            )
        except Exception as error:  # whatever a template does with messages that it wasn't made for
            raise UnreadableMessages(
                f"the chat template of {self.tokenizer.name_or_path} can't write these messages: "
                f"{type(error).__name__}: {error}"
            ) from None
        return str(text)

    def places(
        self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any], text: str
    ) -> Iterator[tuple[int, slice, slice | None]]:
        """Where in the conversation's ``text`` the assistant's messages are.

        Yields the index of each, the text between the content before it and the content behind it, and the place of its
        own content, if it has some. Nothing where the template hides that.
        """
        marked, halves = list(messages), dict[int, tuple[str, str]]()
        for index, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, str) and (stripped := content.strip()):
                half = content.index(stripped) + (len(stripped) + 1) // 2
                halves[index] = content[:half].lstrip(), content[half:].rstrip()
                marked[index] = {**message, "content": f"{content[:half]}{MARK}{index}{MARK}{content[half:]}"}
        try:
            shown = self.write(marked, arguments)
        except UnreadableMessages:
            return
        if re.sub(f"{MARK}[0-9]+{MARK}", "", shown) != text:
            return
        contents, removed = dict[int, slice](), 0
        for match in re.finditer(f"{MARK}([0-9]+){MARK}", shown):
            index, at = int(match[1]), match.start() - removed
            removed += len(match[0])
            before, behind = halves[index]
            if index in contents or not (text.endswith(before, 0, at) and text.startswith(behind, at)):
                before = behind = ""  # it is written twice, or not as it is
            contents[index] = slice(at - len(before), at + len(behind))
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                start = max((part.stop for i, part in contents.items() if i < index), default=0)
                end = min((part.start for i, part in contents.items() if i > index), default=len(text))
                own = contents.get(index)
                yield index, slice(start, end), own if own is not None and own.stop > own.start else None

    def encode(self, text: str, behind: int | None = None) -> list[int]:
        """A text's ids, behind an earlier token: a piece of a text may differ from a text's beginning."""
        if not text:
            return []
        if behind in self._end_texts:
            before = self.tokenizer.encode(self._end_texts[behind], add_special_tokens=False)
            whole = self.tokenizer.encode(self._end_texts[behind] + text, add_special_tokens=False)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def said(self, ids: Sequence[int]) -> tuple[str, bool]:
        """A turn's text without the token that ended it, and whether one did."""
        ended = bool(ids) and ids[-1] in self.ends
        return self.decode(ids[:-1] if ended else ids), ended

    def sampled_of(self, text: str, at: int, last: int) -> int:
        """Characters of ``text`` from ``at`` on that the last sampled token is: where a turn ends with what begins the
        next message."""
        end = self._end_texts.get(last, "")
        return len(end) if end and not text.endswith(end, 0, at) and text.startswith(end, at) else 0

    def read_up_to(self, text: str, ids: Sequence[int]) -> int:
        """Where in a conversation's text the ids of its last turn end: behind the token that ended it, if one did,
        else before the text that ends turns."""
        last = ids[-1] if ids else None
        start = len(text) - len(self.end) if text.endswith(self.end) else len(text)
        if last not in self.ends:
            return start
        at = text.rfind(self._end_texts[last], min(start, len(text) - 1))
        return start if at < 0 else at + len(self._end_texts[last])


class SessionContexts:
    """The contexts of one session's requests."""

    def __init__(self, form: ChatFormat) -> None:
        self.form = form
        self.turns: list[Turn | None] = []  # None: of a request without messages
        self._by_key: dict[str, list[Turn]] = {}  # by the key of their messages

    def context(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], most: int | None = None
    ) -> Context:
        """The ids of a request's messages.

        Args:
            arguments: of the template, ``tools`` among them.
            most: characters that are tokenised.

        Raises:
            UnreadableMessages: the template can't write them, or they are too long.
        """
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
            and keys[turn.place] == turn.key  # no other that begins alike
            for begun in turn.texts
            if text.startswith(begun)
        ]
        at, after = max(known, default=(0, None))
        ids: list[int] = []
        if after is not None:
            turn = self.turns[after]
            assert turn is not None
            ids = list(turn.ids)
            at += self.form.sampled_of(text, at, ids[-1])
        for piece in self._pieces(written, arguments, text, at):
            ids += piece if isinstance(piece, list) else self.form.encode(piece, ids[-1] if ids else None)
        return Context(ids, text, written, dict(arguments), after)

    def add(self, context: Context | None, wrote: Sequence[int], reply: Mapping[str, Any], whole: bool = True) -> int:
        """Record a turn; returns its number.

        Args:
            context: that it answered; None: of a request without messages, which nothing goes on from.
            reply: the message that the program was given.
            whole: the reply says all that was sampled; False: a stop string was cut off.
        """
        self.turns.append(None)
        number = len(self.turns) - 1
        if context is None or not wrote:
            return number
        message, key = as_written(reply), _key(reply)
        try:
            text = self.form.write([*context.messages, message], context.arguments, begins=False)
        except UnreadableMessages:  # a template may want answers behind calls
            return number
        texts = [context.text + self.form.decode(wrote)]
        if whole:
            texts.append(text[: self.form.read_up_to(text, wrote)])
        turn = self.turns[number] = Turn(
            tuple(texts), [*context.ids, *wrote], list(wrote), message, key, len(context.messages)
        )
        self._by_key.setdefault(key, []).append(turn)
        return number

    def _pieces(
        self, messages: Sequence[dict[str, Any]], arguments: Mapping[str, Any], text: str, at: int
    ) -> Iterator[str | list[int]]:
        """A text from ``at`` on in pieces: sampled ids where it has a turn of the model, texts between them."""
        turns = self._turns_of(messages)
        if at < len(text) and turns:
            for index, around, content in self.form.places(messages, arguments, text):
                turn = turns.get(index)
                if turn is None or around.stop <= at:
                    continue
                around = slice(max(around.start, at), around.stop)
                for first, ids in self._runs(turn, text, around, content):
                    if first >= at:
                        yield text[at:first]
                        yield ids
                        at = first + len(self.form.decode(ids))
        yield text[at:]

    def _turns_of(self, messages: Sequence[Mapping[str, Any]]) -> dict[int, Turn]:
        """The turn that each message is, by its index. Of equal ones the last message is the newest turn."""
        found: dict[int, Turn] = {}
        left = {key: [*turns] for key, turns in self._by_key.items()}
        for index in reversed(range(len(messages))):
            if messages[index].get("role") == "assistant" and (turns := left.get(_key(messages[index]))):
                found[index] = turns.pop()
        return found

    def _runs(self, turn: Turn, text: str, around: slice, content: slice | None) -> Iterator[tuple[int, list[int]]]:
        """What a text keeps of a turn: where, and the ids that were sampled.

        Args:
            around: where in the text the turn's message is.
            content: where the message's content is, if it has some.
        """
        said, ended = self.form.said(turn.wrote)
        ids = turn.wrote[:-1] if ended else turn.wrote
        for whole, of_whole in ((self.form.decode(turn.wrote), turn.wrote), (said, ids)):
            if len(whole) >= DISTINCT and (first := text.find(whole, around.start, around.stop)) >= 0:
                yield first, of_whole
                return
        places = [*_places(self.form, ids)]

        def kept(part: str, inside: int, first: int) -> Iterator[tuple[int, list[int]]]:
            """The tokens that lie in a part of what was said from its first character to its last."""
            low = bisect.bisect_left(places, inside)
            high = bisect.bisect_right(places, inside + len(part)) - 1
            if first >= 0 and low < high:
                start, end = (first + places[i] - inside for i in (low, high))
                if self.form.decode(ids[low:high]) == text[start:end]:
                    yield start, ids[low:high]

        parts, at = [], 0  # reasoning, content and calls, each with its place in what was said
        for name in ("reasoning", "content"):
            part = str(turn.message.get(name) or "").strip()
            found = said.find(part, at) if part else -1
            parts.append((part, found) if found >= 0 else ("", at))
            at = found + len(part) if found >= 0 else at
        calls = said[at:].strip() if turn.message.get("tool_calls") else ""
        (reasoning, of_reasoning), (own, of_own) = parts
        after = around.start if content is None else content.stop
        shown = text.find(calls, after, around.stop) if len(calls) >= DISTINCT else -1
        if len(reasoning) >= DISTINCT:
            before = content.start if content is not None else shown if shown >= 0 else around.stop
            yield from kept(reasoning, of_reasoning, text.rfind(reasoning, around.start, before))
        if content is not None and own:
            yield from kept(own, of_own, content.start)
        if shown >= 0:
            yield from kept(calls, said.index(calls, at), shown)


def _places(form: ChatFormat, ids: Sequence[int]) -> Iterator[int]:
    """Where in the ids' text each token begins, and the end; a character of several tokens begins with the first."""
    yield 0
    text, start = "", 0  # the text of whole characters, and the token after them
    for index in range(len(ids)):
        piece = form.decode(ids[start : index + 1])
        if not piece.endswith("\N{REPLACEMENT CHARACTER}"):
            text, start = text + piece, index + 1
        yield len(text)


def as_written(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the API as chat templates take it: texts of its parts, arguments of calls as objects, reasoning by
    all its names; nothing that is null."""
    found = {name: value for name, value in message.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    found.setdefault("content", "")
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"].get("arguments"))}}
            for call in calls
        ]
    else:
        found.pop("tool_calls", None)
    reasoning = next((found[name] for name in REASONING if found.get(name)), None)
    for name in REASONING:
        found.pop(name, None)
        if reasoning is not None:
            found[name] = reasoning
    return found


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return parse_json(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def _key(message: Mapping[str, Any]) -> str:
    """Equal of a reply and of the message that a program sends back as it, with or without the reasoning."""
    written = as_written(message)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in written.get("tool_calls", ())]
    return json.dumps([str(written["content"]).strip(), calls], sort_keys=True, default=str)

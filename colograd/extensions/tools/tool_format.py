"""Reads the calls of a turn and writes tools' answers as tokens, with the tokenizer's chat template and parser."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jinja2

from ...batch import ModelInput
from ...data.messages import without_nones
from ...rollout.texts import ToolCall, as_calls, has_parser, parsed_turn
from ...usercode.untrusted import parse_json

# The format of calls by Hermes, Qwen 2.5 and 3, SmolLM and others: JSON with a name and arguments.
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
ASKED = {"role": "user", "content": "asked"}


class ToolFormat:
    """The format of tool calls and answers in a tokenizer's chat template.

    Calls are read by the tokenizer's own ``parse_response`` if it has a ``response_template`` or
    ``response_schema``, else as JSON between ``<tool_call>`` and ``</tool_call>``.

    Args:
        template_kwargs: further arguments of the template.
        reader: `ImageReader` of a vision-language model. Its processor's template gets all contents as parts.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any], reader: Any = None) -> None:
        self._tokenizer, self._kwargs, self.reader = tokenizer, template_kwargs, reader
        self._parses = has_parser(tokenizer)
        template = getattr(tokenizer if reader is None else reader.processor, "chat_template", None)
        if not template:
            raise ValueError("tools need a chat template, which the tokenizer hasn't: set chat_template_path.")
        call = _assistant_message("", [ToolCall("the_name", {"the_argument": "the value"})])
        answer = {"role": "tool", "name": "the_name", "content": "the answer"}
        try:
            if reader is None:
                shown = tokenizer.apply_chat_template([ASKED, call, answer], tokenize=False, **template_kwargs)
            else:
                shown = reader.tokens(reader.split([ASKED, call, answer], "")[0], template_kwargs)[0]
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            shown = f"({type(error).__name__}: {error})"
        if "{'type': 'text'" in shown:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} writes contents as they are, where a model that reads "
                "images has parts: set chat_template_path to one that writes the parts of every message."
            )
        for part in ("the_name", "the_argument", "the value", "the answer"):
            if part not in shown:
                raise ValueError(
                    f"the chat template of {tokenizer.name_or_path} doesn't write tools' calls and answers ({part!r} "
                    f"of a conversation with both is missing in {shown[-200:]!r}): set chat_template_path to one that "
                    "does, such as recipes/chat_templates/smollm2_tools.jinja."
                )
        if not self._parses and not CALL.search(shown):
            raise ValueError(
                f"nothing is known that reads tool calls as {tokenizer.name_or_path} writes them: set the tokenizer's "
                "response_template (see response parsing in transformers' documentation)."
            )
        # The special token that ends a turn in the template; None: the template writes none. It is the tokenizer's end
        # token, or another one such as ``<|im_end|>`` in ChatML for base models.
        begun, before = self._read([ASKED], add_generation_prompt=True).ids, self._read([ASKED, call]).ids
        same = next((i for i, (a, b) in enumerate(zip(begun, before, strict=False)) if a != b), len(begun))
        eos, special = tokenizer.eos_token_id, {*tokenizer.all_special_ids}
        ends = [token for token in before[same:] if token in special]
        self._end: int | None = eos if eos in ends or not ends else ends[-1]
        self.answer([answer])

    def read(
        self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict] | None
    ) -> tuple[dict[str, Any], list[ToolCall]]:
        """Return a turn as a message, and its calls. Malformed calls remain text."""
        parsed = parsed_turn(self._tokenizer, ids, prompt_ids, tools) if self._parses else None
        if parsed is not None:
            message, calls = parsed
            return {**message, **_assistant_message(message.get("content") or "", calls)}, calls
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        text, calls = text.removesuffix(self._tokenizer.eos_token or "").strip(), []
        if not self._parses:
            with contextlib.suppress(ValueError):  # one call is malformed
                calls = as_calls(parse_json(match[1]) for match in CALL.finditer(text)) or []
        return _assistant_message(text[: text.index("<tool_call>")].strip() if calls else text, calls), calls

    def answer(
        self, messages: Sequence[dict[str, Any]], own: dict[str, Any] | None = None, last: int | None = None
    ) -> ModelInput:
        """Return the model's input from the end of a turn to the start of the next, with the tools' answers.

        It is appended to the sampled tokens, so that no sampled token is tokenised again.

        Args:
            own: the row's further arguments of the template.
            last: the turn's last token; None: the template's end of a turn. If the model ended the turn with another
                token, the result begins with the template's end of a turn.
        """
        call = _assistant_message("", [ToolCall(messages[0]["name"], {})])
        given = without_nones(own or {})
        before = self._read([ASKED, call], **given).ids
        whole = self._read([ASKED, call, *messages], **given, add_generation_prompt=True)
        start = self._place(before, whole.ids)
        if whole.ids[start] == (self._end if last is None else last):
            start += 1
        if (images := whole.images) is None:
            return ModelInput(whole.ids[start:])
        images = dataclasses.replace(  # all are behind `start`; up to there the engine's tokens are the same
            images, engine_ids=images.engine_ids[start:], places=tuple(place - start for place in images.places)
        )
        return ModelInput(whole.ids[start:], images)

    def _place(self, before: tuple[int, ...], whole: tuple[int, ...]) -> int:
        """Return the index in ``whole``, which continues ``before``'s messages, where the turn's content ends."""
        end = self._end
        if end in before:
            # The turn ends at the last end token in `before`. Count the end tokens, because a template may write
            # earlier turns differently once something follows them. Tokens behind the end, mostly a newline, weren't
            # sampled.
            places = [place for place, token in enumerate(whole) if token == end]
            return places[before.count(end) - 1]
        if whole[: len(before)] == before:
            return len(before)
        raise ValueError(
            f"the chat template of {self._tokenizer.name_or_path} neither ends turns with a special token, nor leaves "
            "earlier turns as they are when a tool's answer follows: set chat_template_path."
        )

    def _read(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> ModelInput:
        arguments = {**self._kwargs, **kwargs}
        if self.reader is None:
            return ModelInput(
                tuple(self._tokenizer.apply_chat_template([*messages], tokenize=True, return_dict=False, **arguments))
            )
        shown, pictures = self.reader.split(messages, "a tool's answer")
        if pictures:
            return self.reader.made(shown, pictures, arguments)
        return ModelInput(self.reader.tokens(shown, arguments)[1])  # image tokens in a tool's text stay as they are


def _assistant_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return an assistant's message in the format of chat templates."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return message

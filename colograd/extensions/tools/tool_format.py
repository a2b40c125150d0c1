"""`ToolFormat`: reads tool calls from sampled tokens, and tokenises tools' answers with the chat template."""

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

# A tool call of Hermes, Qwen 2.5 and 3, SmolLM and others: JSON with a name and arguments.
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
QUESTION = {"role": "user", "content": "question"}


class ToolFormat:
    """Reads tool calls, and writes tools' answers. ``reader`` is the `ImageReader` of a vision-language model."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any], reader: Any = None) -> None:
        self._tokenizer, self._kwargs, self.reader = tokenizer, template_kwargs, reader
        self._parses = has_parser(tokenizer)
        template = getattr(tokenizer if reader is None else reader.processor, "chat_template", None)
        if not template:
            raise ValueError("tools need a chat template, but the tokenizer has none: set chat_template_path.")
        call = _assistant_message("", [ToolCall("the_name", {"the_argument": "the value"})])
        answer = {"role": "tool", "name": "the_name", "content": "the answer"}
        try:
            if reader is None:
                shown = tokenizer.apply_chat_template([QUESTION, call, answer], tokenize=False, **template_kwargs)
            else:
                shown = reader.tokens(reader.split([QUESTION, call, answer], "")[0], template_kwargs)[0]
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            shown = f"({type(error).__name__}: {error})"
        if "{'type': 'text'" in shown:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} writes a message's list of content parts as Python "
                "code, but must write each part's text or image: set chat_template_path to a template that does."
            )
        for part in ("the_name", "the_argument", "the value", "the answer"):
            if part not in shown:
                raise ValueError(
                    f"the chat template of {tokenizer.name_or_path} doesn't write tools' calls and answers (a test "
                    f"conversation lacks {part!r}: {shown[-200:]!r}): set chat_template_path to a template that "
                    "does, such as recipes/chat_templates/smollm2_tools.jinja."
                )
        if not self._parses and not CALL.search(shown):
            raise ValueError(
                f"no parser is known for the tool calls that {tokenizer.name_or_path} writes: set the tokenizer's "
                "response_template (see response parsing in transformers' documentation)."
            )
        # `_end`: token that ends an assistant's message, e.g. ``<|im_end|>`` in ChatML. Without one: the EOS token.
        begun, before = self._read([QUESTION], add_generation_prompt=True).ids, self._read([QUESTION, call]).ids
        same = next((i for i, (a, b) in enumerate(zip(begun, before, strict=False)) if a != b), len(begun))
        eos, special = tokenizer.eos_token_id, {*tokenizer.all_special_ids}
        ends = [token for token in before[same:] if token in special]
        self._end: int | None = eos if eos in ends or not ends else ends[-1]
        self.answer([answer])

    def read(
        self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict] | None
    ) -> tuple[dict[str, Any], list[ToolCall]]:
        """Return an assistant message and its tool calls. If one call is malformed, all calls remain text."""
        parsed = parsed_turn(self._tokenizer, ids, prompt_ids, tools) if self._parses else None
        if parsed is not None:
            message, calls = parsed
            return {**message, **_assistant_message(message.get("content") or "", calls)}, calls
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        text, calls = text.removesuffix(self._tokenizer.eos_token or "").strip(), []
        if not self._parses:
            with contextlib.suppress(ValueError):
                calls = as_calls(parse_json(match[1]) for match in CALL.finditer(text)) or []
        return _assistant_message(text[: text.index("<tool_call>")].strip() if calls else text, calls), calls

    def answer(
        self, messages: Sequence[dict[str, Any]], own: dict[str, Any] | None = None, last: int | None = None
    ) -> ModelInput:
        """Return the tokens that follow a completion: the tools' answers ``messages``, and the next generation prompt.

        Args:
            own: the dataset row's arguments of the chat template (`chat_template_kwargs`).
            last: the completion's last token. None: the chat template's token for the end of a message.
        """
        call, arguments = _assistant_message("", [ToolCall(messages[0]["name"], {})]), without_nones(own or {})
        before = self._read([QUESTION, call], **arguments).ids
        whole = self._read([QUESTION, call, *messages], **arguments, add_generation_prompt=True)
        if self._end in before:
            # End tokens are counted, because templates may write a message differently when others follow.
            start = [place for place, token in enumerate(whole.ids) if token == self._end][before.count(self._end) - 1]
        elif whole.ids[: len(before)] == before:
            start = len(before)
        else:
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path} ends messages without a special token, and "
                "writes a message differently if a tool's answer follows: set chat_template_path to another template."
            )
        if whole.ids[start] == (self._end if last is None else last):
            start += 1
        if (images := whole.images) is not None:  # All images are behind `start`: before it `engine_ids` equal `ids`.
            places = tuple(place - start for place in images.places)
            images = dataclasses.replace(images, engine_ids=images.engine_ids[start:], places=places)
        return ModelInput(whole.ids[start:], images)

    def _read(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> ModelInput:
        arguments = {**self._kwargs, **kwargs}
        if self.reader is None:
            apply = self._tokenizer.apply_chat_template
            return ModelInput(tuple(apply([*messages], tokenize=True, return_dict=False, **arguments)))
        shown, pictures = self.reader.split(messages, "a tool's answer")
        if pictures:
            return self.reader.made(shown, pictures, arguments)
        return ModelInput(self.reader.tokens(shown, arguments)[1])  # Without images, an image token's name stays text.


def _assistant_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return message

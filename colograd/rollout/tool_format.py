"""Reads the calls of a turn and writes tools' answers as tokens, by the tokenizer's chat template and parser."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from ..batch import FinishReason, Group, ModelInput
from ..data.images import ImageReader, with_images
from ..data.messages import without_nones
from ..usercode.untrusted import clean, parse_json

# How Hermes, Qwen 2.5 and 3, SmolLM and others write a call: JSON with a name and arguments.
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
ASKED = {"role": "user", "content": "asked"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for."""

    name: str
    arguments: dict[str, Any]


class ToolFormat:
    """How a tokenizer's chat template writes tool calls and answers.

    Calls are read by the tokenizer's own ``parse_response`` where it has a ``response_template`` or
    ``response_schema``, else as JSON between ``<tool_call>`` and ``</tool_call>``.

    Args:
        tokenizer: with a chat template.
        template_kwargs: further arguments of the template.
        reader: of images, of a model that sees: its processor's template gets all contents as parts.

    Raises:
        ValueError: the template can't show a tool's answer, or nothing is known that reads its calls.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any], reader: ImageReader | None = None) -> None:
        self._tokenizer, self._kwargs, self._reader = tokenizer, template_kwargs, reader
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
                shown = reader.tokens(with_images([ASKED, call, answer], (), "")[0], template_kwargs)[0]
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
        self._end = self._end_of_turn(call)
        self.answer_ids([answer])

    def read(
        self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict] | None
    ) -> tuple[dict[str, Any], list[ToolCall]]:
        """What a turn says, as a message, and its calls. Malformed calls are text."""
        parsed = parsed_turn(self._tokenizer, ids, prompt_ids, tools) if self._parses else None
        if parsed is not None:
            message, calls = parsed
            return {**message, **_assistant_message(message.get("content") or "", calls)}, calls
        text = self._decode(ids)
        calls = [] if self._parses else _calls_in(text)
        return _assistant_message(text[: text.index("<tool_call>")].strip() if calls else text, calls), calls

    @property
    def shows_images(self) -> bool:
        """Whether an answer may have some."""
        return self._reader is not None

    def answer_ids(
        self, messages: Sequence[dict[str, Any]], own: dict[str, Any] | None = None, last: int | None = None
    ) -> tuple[int, ...]:
        """The tokens of `answer`."""
        return self.answer(messages, own, last).ids

    def answer(
        self, messages: Sequence[dict[str, Any]], own: dict[str, Any] | None = None, last: int | None = None
    ) -> ModelInput:
        """What the model reads from the end of a turn to the start of the next, with tools' answers between them.

        It is appended to what was sampled: nothing that the model wrote is tokenised again.

        Args:
            messages: the tools' answers, in the order of the calls.
            own: the row's further arguments of the template.
            last: the turn's last token; None: the template's end of a turn. The result continues
                behind it: the template's end of a turn comes first where the model ended the turn otherwise.

        Raises:
            REFUSALS (see `data.images`): the processor takes no such images.
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
        images = dataclasses.replace(  # all of them are behind the start, up to which the engine's tokens are the same
            images, engine_ids=images.engine_ids[start:], places=tuple(place - start for place in images.places)
        )
        return ModelInput(whole.ids[start:], images)

    def _end_of_turn(self, call: dict[str, Any]) -> int | None:
        """The special token that the template ends turns with: the end token, or another one, as ``<|im_end|>`` in
        ChatML for base models. None: the template writes none."""
        begun, before = self._read([ASKED], add_generation_prompt=True).ids, self._read([ASKED, call]).ids
        same = next((i for i, (a, b) in enumerate(zip(begun, before, strict=False)) if a != b), len(begun))
        eos, special = self._tokenizer.eos_token_id, {*self._tokenizer.all_special_ids}
        ends = [token for token in before[same:] if token in special]
        return eos if eos in ends or not ends else ends[-1]

    def _place(self, before: tuple[int, ...], whole: tuple[int, ...]) -> int:
        """Where in ``whole``, which goes on behind ``before``, the turn's content ends."""
        end = self._end
        if end in before:
            # The turn's end is the last end token so far. Counted, for a template may write earlier turns differently
            # once something follows them; and what follows the end (a newline, mostly) wasn't sampled.
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
        if self._reader is None:
            return ModelInput(
                tuple(self._tokenizer.apply_chat_template([*messages], tokenize=True, return_dict=False, **arguments))
            )
        shown, pictures = with_images([*messages], (), "a tool's answer")
        if pictures:
            return self._reader.made(shown, pictures, arguments)
        return ModelInput(self._reader.tokens(shown, arguments)[1])  # an image token that a tool wrote is a token

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        end = self._tokenizer.eos_token
        return (text.removesuffix(end) if end else text).strip()


def has_parser(tokenizer: Any) -> bool:
    """Whether the tokenizer says how its model's turns are read (response parsing in transformers)."""
    return any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))


def parsed_turn(
    tokenizer: Any, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict] | None
) -> tuple[dict[str, Any], list[ToolCall]] | None:
    """A turn and its calls as the tokenizer's own parser reads them; None where it can't, or a call isn't one."""
    kwargs: dict[str, Any] = {}
    if getattr(tokenizer, "response_template", None) is not None:
        kwargs = {"prefix": list(prompt_ids), "tools": list(tools or ()) or None}
    try:
        message = clean(tokenizer.parse_response(list(ids), **kwargs))
        found = message.get("tool_calls") or ()
        calls = _as_calls(call.get("function", call) if isinstance(call, dict) else call for call in found)
    except Exception:  # whatever a parser makes of a malformed call
        return None
    if calls is None:
        return None
    if isinstance(message.get("content"), str) and tokenizer.eos_token:
        message["content"] = message["content"].removesuffix(tokenizer.eos_token)
    return message, calls


def with_messages(group: Group, tokenizer: Any) -> Group:
    """The group with its completions as messages, where the tokenizer has a parser for them: reward functions then get
    what it finds (thoughts apart from the answer, say), as in TRL. Conversations have theirs already."""
    if not has_parser(tokenizer) or not isinstance(group.example.get("prompt"), list):
        return group
    rollouts = []
    for rollout in group.rollouts:
        parsed = None if rollout.messages else parsed_turn(tokenizer, rollout.completion_ids, rollout.prompt_ids, None)
        if parsed is not None:
            message = {"role": "assistant", **parsed[0], "content": parsed[0].get("content") or ""}
            rollout = dataclasses.replace(rollout, messages=(message,))
        rollouts.append(rollout)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def completion_texts(group: Group, tokenizer: Any, skip_special_tokens: bool = True) -> list[str]:
    """Return the texts of a group's completions. The special token that ended one is in none of them."""
    ids = [list(rollout.completion_ids) for rollout in group.rollouts]
    if not skip_special_tokens:
        special = {*tokenizer.all_special_ids}
        ended = [rollout.finish_reason is FinishReason.STOP for rollout in group.rollouts]
        ids = [own[:-1] if end and own and own[-1] in special else own for own, end in zip(ids, ended, strict=True)]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens)
    return texts


def with_prompt_text(group: Group, tokenizer: Any) -> Group:
    """Return the group with the column ``prompt_texts`` for reward functions: the prompt as the model reads it, with
    special tokens and the beginning of the answer that the chat template writes. Environments may change it for each
    rollout."""
    prompts = {each.prompt_ids for each in group.rollouts}
    texts = {ids: tokenizer.decode(list(ids), skip_special_tokens=False) for ids in prompts}
    rollouts = (
        dataclasses.replace(each, columns={**each.columns, "prompt_texts": texts[each.prompt_ids]})
        for each in group.rollouts
    )
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def _calls_in(text: str) -> list[ToolCall]:
    """The calls in a text; none where any of them isn't one."""
    try:
        return _as_calls(parse_json(match[1]) for match in CALL.finditer(text)) or []
    except ValueError:
        return []


def _as_calls(found: Iterable[Any]) -> list[ToolCall] | None:
    """The calls in JSON; None where one of them hasn't a name, or its arguments have none."""
    calls = []
    for call in found:
        arguments = call.get("arguments") or {} if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return None
        calls.append(ToolCall(call["name"], arguments))
    return calls


def _assistant_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An assistant's message, as chat templates take it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return message

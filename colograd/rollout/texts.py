"""Decode prompts to texts, and parse completions to chat messages with tool calls, for reward functions and logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..batch import Group
from ..usercode.untrusted import clean


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def with_prompt_text(group: Group, tokenizer: Any) -> Group:
    """Add the column ``prompt_texts`` for reward functions to a group's rollouts: each rollout's prompt as the model
    reads it, with special tokens and the chat template's beginning of the answer. Environments may give the rollouts of
    a group different prompts."""
    prompts = {each.prompt_ids for each in group.rollouts}
    texts = {ids: {"prompt_texts": tokenizer.decode(list(ids), skip_special_tokens=False)} for ids in prompts}
    own = (dataclasses.replace(each, columns={**each.columns, **texts[each.prompt_ids]}) for each in group.rollouts)
    return dataclasses.replace(group, rollouts=tuple(own))


def with_messages(group: Group, tokenizer: Any) -> Group:
    """Parse a group's completions to chat messages, if the tokenizer can parse responses and the prompt is a list of
    messages. As in TRL, reward functions then get parsed messages, e.g. with the reasoning apart from the answer.
    Rollouts that have messages (of a conversation with tools), or that can't be parsed, stay unchanged."""
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


def has_parser(tokenizer: Any) -> bool:
    return any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))


def parsed_turn(
    tokenizer: Any, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict] | None
) -> tuple[dict[str, Any], list[ToolCall]] | None:
    """Parse a completion with the tokenizer's parser. Return (message, tool calls), or None for a malformed one."""
    kwargs: dict[str, Any] = {}
    if getattr(tokenizer, "response_template", None) is not None:
        kwargs = {"prefix": list(prompt_ids), "tools": list(tools or ()) or None}
    try:
        message = clean(tokenizer.parse_response(list(ids), **kwargs))
        found = message.get("tool_calls") or ()
        calls = as_calls(call.get("function", call) if isinstance(call, dict) else call for call in found)
    except Exception:  # a parser may raise any error for a malformed tool call
        return None
    if calls is None:
        return None
    if isinstance(message.get("content"), str) and tokenizer.eos_token:
        message["content"] = message["content"].removesuffix(tokenizer.eos_token)
    return message, calls


def as_calls(found: Iterable[Any]) -> list[ToolCall] | None:
    """Convert parsed JSON to tool calls. Return None if a call has no name, or if its arguments aren't a dict."""
    calls = []
    for call in found:
        arguments = call.get("arguments") or {} if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return None
        calls.append(ToolCall(call["name"], arguments))
    return calls

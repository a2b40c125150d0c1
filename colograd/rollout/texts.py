"""Prompts as texts, and completions as chat messages with tool calls, for reward functions and logs."""

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
    prompts = {each.prompt_ids for each in group.rollouts}
    texts = {ids: {"prompt_texts": tokenizer.decode(list(ids), skip_special_tokens=False)} for ids in prompts}
    own = (dataclasses.replace(each, columns={**each.columns, **texts[each.prompt_ids]}) for each in group.rollouts)
    return dataclasses.replace(group, rollouts=tuple(own))


def with_messages(group: Group, tokenizer: Any) -> Group:
    """Parse the completions of a conversation into messages, e.g. with the reasoning under a separate key.

    Reward functions get these messages, as in TRL. A tokenizer without a response parser leaves the group as it is."""
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
    """Parse a completion. Return (message, tool calls), or None for a malformed completion."""
    kwargs: dict[str, Any] = {}
    if getattr(tokenizer, "response_template", None) is not None:
        kwargs = {"prefix": list(prompt_ids), "tools": list(tools or ()) or None}
    try:
        message = clean(tokenizer.parse_response(list(ids), **kwargs))
        found = message.get("tool_calls") or ()
        calls = as_calls(call.get("function", call) if isinstance(call, dict) else call for call in found)
    except Exception:  # The parser may raise errors of any class for malformed tool calls.
        return None
    if calls is None:
        return None
    if isinstance(message.get("content"), str) and tokenizer.eos_token:
        message["content"] = message["content"].removesuffix(tokenizer.eos_token)
    return message, calls


def as_calls(found: Iterable[Any]) -> list[ToolCall] | None:
    calls = []
    for call in found:
        arguments = call.get("arguments") or {} if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return None
        calls.append(ToolCall(call["name"], arguments))
    return calls

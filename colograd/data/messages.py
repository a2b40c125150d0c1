"""Checks of chat messages, and conversions for a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jinja2

FAILURES = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)


def without_nones(value: Any) -> Any:
    """Return ``value`` without dict keys whose value is None, at any depth. Arrow adds keys that other rows have."""
    if isinstance(value, dict):
        return {key: without_nones(each) for key, each in value.items() if each is not None}
    return [without_nones(each) for each in value] if isinstance(value, list) else value


def content_parts(content: Any) -> list[dict[str, Any]]:
    parts = content if isinstance(content, list) else [content or ""]
    return [
        {key: value for key, value in part.items() if value is not None}
        if isinstance(part, dict)
        else {"type": "text", "text": str(part)}
        for part in parts
    ]


def text_of(prompt: Any) -> Any:
    if not isinstance(prompt, list):
        return prompt
    return [
        {**m, "content": [{k: v for k, v in p.items() if k != "image"} for p in content_parts(m["content"])]}
        if isinstance(m, dict) and isinstance(m.get("content"), list)
        else m
        for m in prompt
    ]


def content_problem(message: dict[str, Any], images: bool = False) -> str:
    content = message.get("content")
    if content is None:  # Messages with tool calls may lack content, as in OpenAI's API.
        alone = not any(value for key, value in message.items() if key not in ("role", "name", "content"))
        return "no content: write a text" if alone and not images else ""
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (None, "text", "image") or (kind == "image" and not images):
            reads = "text and images" if images else "text alone"
            return f"a part of type {kind!r}, but the model is trained on {reads}: remove it"
        if kind != "image" and not isinstance(part.get("text") if isinstance(part, dict) else part, str):
            return f'the content {part!r}, but must have a text, or a list of parts {{"type": "text", "text": ...}}'
    return ""


def check_prompt(prompt: Any, where: str, images: bool = False) -> None:
    if isinstance(prompt, str):
        return
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and ("content" in m or (not images and len(m) > 1))
        for m in messages
    ):
        rule = 'it must be a text, or a list of messages such as [{"role": "user", "content": "..."}]'
        raise ValueError(f"{where}: the prompt is {prompt!r}; {rule}.")
    for index, message in enumerate(messages):
        if problem := content_problem(message, images):
            raise ValueError(f"{where}: message {index} of the prompt (role {message['role']}) has {problem}.")


def template_messages(
    messages: Sequence[dict[str, Any]], write: Callable[[list[dict[str, Any]]], str]
) -> list[dict[str, Any]]:
    """Return ``messages`` in a form that the chat template can write. ``write`` applies the template.

    If the template fails, or loses or garbles a content that is a list or None, all these contents become texts."""
    original = [{"content": None} | without_nones(message) for message in messages]
    joined = [{**message, "content": _joined(message["content"])} for message in original]
    if original == joined:
        return original
    try:
        text, joined_text = write(original), write(joined)
    except FAILURES:
        return joined
    contents = [message["content"] for message in original if not isinstance(message["content"], str)]
    raw = [form for each in contents for form in (str(each), json.dumps(each, ensure_ascii=False, default=str))]
    if any(text.count(form) > joined_text.count(form) for form in raw):
        return joined
    # Some templates trim each part, so spaces don't count in the comparison.
    text, joined_text = "".join(text.split()), "".join(joined_text.split())
    parts = ["".join(_joined([part]).split()) for each in contents for part in each or []]
    is_lost = any(part and text.count(part) < joined_text.count(part) for part in parts)
    return joined if is_lost else original


def _joined(content: Any) -> str:
    return "".join(str(part.get("text") or "") for part in content_parts(content))

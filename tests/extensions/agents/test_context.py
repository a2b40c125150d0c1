"""Tokens in, tokens out: over chat templates of many families, a continued conversation has the very ids."""

from __future__ import annotations

import random
from typing import Any

import agent_cases
import pytest
from template_families import FAMILIES, Model, families, tokenizer_of

from colograd.batch import FinishReason
from colograd.extensions.agents.branches import TokenTree, branches_of
from colograd.extensions.agents.context import ChatFormat, SessionContexts
from colograd.extensions.agents.engine.chat_api import BadRequest


def a_session(model: Model, form: ChatFormat, figures: dict[str, int]) -> None:
    """Simulate an agent's program with tools and reasoning. It may drop turns, compact, branch, repeat a request."""
    draw, session = model.draw, SessionContexts(form)
    arguments = {"tools": agent_cases.TOOLS} if model.family.most_calls else {}
    messages: list[dict[str, Any]] = [{"role": "user", "content": model.words(5)}]
    if draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": model.words(5)})
    begun, samples = [*messages], list[tuple[list[int], list[int]]]()
    for _ in range(draw.randint(2, 7)):
        try:
            context = session.context(messages, arguments)
        except BadRequest:  # GPT-OSS's template can't write calls without answers
            return
        figures["requests"] += 1
        ids = context.ids
        if context.after is not None:
            before = session.turns[context.after].ids  # type: ignore[union-attr]
            assert ids[: len(before)] == before, "it goes on from the very ids"
            figures["went on"] += 1
        wrote, reply = model.turn()
        session.add(context, wrote, reply)
        samples.append((ids, wrote))
        sent = reply
        if draw.random() < 0.3:  # some programs don't send reasoning back
            sent = {name: value for name, value in reply.items() if name != "reasoning"}
            figures["dropped reasoning"] += "reasoning" in reply
        messages = [*messages, sent]
        for call in reply.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": model.words(3)})
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": model.words(4)})
            if draw.random() < 0.2:  # the program compacts: one or two messages stay
                messages = [*begun, *(messages[-2:] if draw.random() < 0.5 else messages[-1:])]
                figures["compacted"] += 1
    tree = TokenTree(samples[0][0])
    for read, wrote in sorted(samples, key=lambda sample: (len(sample[0]), sample[0])):
        tree.add(read, wrote, [0.0] * len(wrote))
    rollout = tree.rollout(0, FinishReason.STOP)
    assert rollout is not None
    trained = [t for t, s in zip(rollout.completion_ids, rollout.sampled.tolist(), strict=True) if s]
    assert sorted(trained) == sorted(token for _, wrote in samples for token in wrote), "each sampled token once"
    figures["sampled tokens"] += len(trained)


@pytest.mark.parametrize("conversations", [30, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_continued_conversation_has_the_very_ids(name: str, conversations: int) -> None:
    family = dict(families())[name]
    tokenizer = tokenizer_of(family)
    draw, figures = (
        random.Random(name),
        dict.fromkeys(("requests", "went on", "dropped reasoning", "compacted", "sampled tokens"), 0),
    )
    model = Model(family, tokenizer, draw)
    form = ChatFormat(tokenizer, {}, model.ends)
    for _ in range(conversations):
        a_session(model, form, figures)
    print(name, figures)
    assert figures["went on"] > conversations // 2


def test_a_conversation_that_no_one_rewrites_is_one_line_of_tokens() -> None:
    family = dict(families())["qwen2.5"]
    tokenizer = tokenizer_of(family)
    model = Model(family, tokenizer, random.Random(0))
    form = ChatFormat(tokenizer, {}, model.ends)
    session, messages = SessionContexts(form), [{"role": "user", "content": "so"}]
    tree = None
    for _ in range(5):
        context = session.context(messages, {"tools": agent_cases.TOOLS})
        tree = tree or TokenTree(context.ids)
        wrote, reply = model.turn()
        tree.add(context.ids, wrote, [0.0] * len(wrote))
        session.add(context, wrote, reply)
        messages += [reply, {"role": "user", "content": "and?"}]
    rollout = tree.rollout(0, FinishReason.STOP)
    assert rollout is not None and branches_of(rollout) == ()

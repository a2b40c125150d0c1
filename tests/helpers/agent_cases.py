"""Agents as users write them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # scripts set threads before torch is imported
    from colograd.batch import Group

CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def client(base_url: str, api_key: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def answered(call: Any) -> str:
    try:
        arguments = json.loads(call.function.arguments)
        return str(arguments["a"] + arguments["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def calculator(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """A loop with a tool. The reward is the number of calls."""
    asked: list[Any] = [{"role": "user", "content": row["question"]}]
    calls = 0
    with client(base_url, api_key) as openai:
        for _ in range(3):
            reply = openai.chat.completions.create(model=model, messages=asked, tools=TOOLS, max_tokens=80)
            message = reply.choices[0].message
            asked.append(message)
            for call in message.tool_calls or ():
                calls += 1
                asked.append({"role": "tool", "tool_call_id": call.id, "content": answered(call)})
            if not message.tool_calls:
                break
    return float(calls)


def compacting(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """An agent that shortens the context of its third request."""
    asked: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": row["question"]}]
    with client(base_url, api_key) as openai:
        for question in ("and then?", "so?"):
            reply = openai.chat.completions.create(model=model, messages=asked, max_tokens=6)
            asked += [reply.choices[0].message, {"role": "user", "content": question}]
        short = [asked[0], {"role": "user", "content": "in short"}, *asked[-2:]]
        openai.chat.completions.create(model=model, messages=short, max_tokens=6)


def trainer(folder: Path) -> Any:
    """Build a trainer of `calculator` whose model calls the tool in every turn."""
    import tiny
    from datasets import Dataset

    from colograd import GRPOTrainer

    model = tiny.make_model(folder / "model", context=1024)
    template = folder / "tools.jinja"
    template.write_text(tiny.TOOL_TEMPLATE)
    config = tiny.config(
        folder,
        max_completion_length=80,
        max_steps=2,
        prompts_per_step=2,
        chat_template_path=str(template),
        vllm_structured_outputs_regex=CALL,
        vllm_importance_sampling_correction=False,
        agent_tool_parser="hermes",
        log_completions=True,
    )
    rows = Dataset.from_list([{"question": f"what is {i}?"} for i in range(4)])
    return GRPOTrainer(str(model), None, config, rows, agent=calculator)


def run(
    trainer: Any, agent: Any, prompts: int = 1, size: int = 2, each: Callable[[Group], Any] = id,
    columns: dict[str, Any] | None = None, calls: bool = False, **settings: Any,
) -> list[Group]:  # fmt: skip
    """Run an agent's sessions with the trainer's engine.

    Args:
        each: function that is called with each complete group.
        columns: further columns of each row.
        calls: whether the model calls `add` in every turn.
        settings: the run's settings of agents that differ from the trainer's.
    """
    from colograd.batch import Prompt
    from colograd.engine.sampling import Sampling
    from colograd.extensions.agents.sessions import Agent, AgentSessions

    own: AgentSessions = trainer.sampler.source
    config: Any = SimpleNamespace(**{**vars(trainer.args), **settings})
    source = AgentSessions(trainer.engine, Agent.of(agent), own.api, own.form, config)
    sampling = Sampling(size, 40, 1.0, {})
    if calls:
        sampling = dataclasses.replace(Sampling.for_training(trainer.args), n=size)
    rows = [{"prompt": "", "question": f"what is {i}?", **(columns or {})} for i in range(prompts)]
    asked = [Prompt(row, (1, 2), i) for i, row in enumerate(rows)]
    trainer.engine.stamp(77)
    groups = []
    try:
        for group in source.generate(asked, sampling, version=77, seed=1):
            each(group)
            groups.append(group)
    finally:
        trainer.engine.version = None
    assert not trainer.engine.core.has_unfinished_requests()
    return sorted(groups, key=lambda group: group.position)

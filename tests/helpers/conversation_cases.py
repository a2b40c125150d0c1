"""Conversations of a random model that calls a tool in every turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from colograd.batch import Group, ModelInput, Prompt
from colograd.data import PromptRules
from colograd.engine.sampling import Sampling
from colograd.extensions.tools.conversations import Conversations
from colograd.extensions.tools.tool_format import ToolCall, ToolFormat
from colograd.extensions.tools.toolbox import Toolbox


def rows(size: int = 8) -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{'so ' * (i % 3)}{i}"}], "start": i} for i in range(size)]
    )


class EachTurnCalls(ToolFormat):
    """Reads a call from any text of a random model."""

    def __init__(self, tokenizer: Any, name: str = "add") -> None:
        super().__init__(tokenizer, {})
        self.name = name

    def read(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Any) -> tuple[dict, list[ToolCall]]:
        return {"role": "assistant", "content": ""}, [ToolCall(self.name, {"a": ids[0] % 10, "b": len(ids)})]


def asked(trainer: Any, size: int) -> tuple[PromptRules, list[Prompt]]:
    rules = PromptRules(trainer.processing_class, 900, "drop", {}, "rows")
    inputs = map(ModelInput, rules.encode(rows(size), 0))
    return rules, [Prompt(row, read, i) for i, (row, read) in enumerate(zip(rows(size), inputs, strict=True))]


def written(trainer: Any, box: Toolbox, name: str = "add", iterations: int = 2, tokens: int = 60) -> list[Group]:
    form = EachTurnCalls(trainer.processing_class, name)
    sampling = Sampling(3, tokens, 1.0, {"stop_token_ids": list(range(40))})  # turns of a few tokens
    rules, prompts = asked(trainer, 3)
    talks = Conversations(trainer.engine, box, form, rules, iterations)
    trainer.engine.stamp(77)
    groups = list(talks.generate(prompts, sampling, version=77, seed=1))
    trainer.engine.version = None
    return sorted(groups, key=lambda group: group.position)

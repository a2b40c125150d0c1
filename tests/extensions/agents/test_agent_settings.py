"""Settings of agents: the rule of each value, and the columns of an agent's dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset

from colograd.config import ScriptArguments
from colograd.data import load_datasets


def load(**kwargs: Any) -> tuple[Dataset, Dataset | None]:
    return load_datasets(ScriptArguments(**kwargs))


def test_an_agents_rows_need_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"item": "lamp"}\n')
    rows, _ = load(dataset_name=str(tmp_path / "rows.jsonl"), agent="shop:run")
    assert rows.column_names == ["item"]
    with pytest.raises(ValueError, match="has no column 'prompt'"):
        load(dataset_name=str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("agent_sampling", "any", "refuse, untrained"),
        ("agent_on_error", "ignore", "raise, abstain"),
        ("agent_parallel", 0, "agent_parallel"),
        ("agent_timeout", 0, "agent_timeout"),
    ],
)
def test_agent_settings_are_checked(tmp_path: Path, name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny.config(tmp_path, **{name: value})

"""Settings of missing extensions, and the rows of settings that exclude each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from colograd.config import GRPOConfig, ModelConfig, ScriptArguments
from colograd.config.conflicts import tables
from colograd.config.knob import rules_of
from colograd.extensions import EXTENSIONS
from colograd.runtime import registry

GROUPS = (GRPOConfig, ModelConfig, ScriptArguments)


@pytest.fixture
def without_extensions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if every extension's folder were missing."""
    caches = (tables, registry.hooks, registry.hooks_of)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "installed", lambda: ())
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GRPOConfig(router_replay=True), "router_replay: true needs the extension `experts`"),
        (lambda: GRPOConfig(overlap="auto"), "overlap: 'auto' needs the extension `overlap`"),
        (lambda: GRPOConfig(sharding="tensor"), "sharding: 'tensor' needs the extension `tensor_parallel`"),
        (lambda: GRPOConfig(gradient_checkpointing="offload"), "offload needs the extension `offload`"),
        (lambda: GRPOConfig(carry_over=0.8), "carry_over: 0.8 needs the extension `carry_over`"),
        (lambda: ModelConfig(load_in_4bit=True), "load_in_4bit: true needs the extension `quantized`"),
        (lambda: ScriptArguments(tools=["my:tool"]), "needs the extension `tools`"),
    ],
)
def test_settings_of_missing_extensions_are_refused(make: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: ())
    with pytest.raises(ValueError, match=said) as raised:
        make()
    assert "is missing: restore that folder, or remove the setting." in str(raised.value)


def test_defaults_need_no_extension(without_extensions: None) -> None:
    for group in GROUPS:
        group(**({"report_to": "none", "overlap": False} if group is GRPOConfig else {}))


def test_rows_name_fields_and_remedies() -> None:
    fields = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    rows = [row for of_one in tables().values() for row in of_one]
    names = {name.partition(".")[0] for row in rows for name in (row.field, row.other) if " " not in name}
    assert names - fields - {""} == set()
    assert all(row.reason and row.remedy and not row.remedy.endswith(".") for row in rows)
    extensions = {
        rules.extension for group in GROUPS for rules in rules_of(group).values() if isinstance(rules.extension, str)
    }
    assert extensions - {"", *EXTENSIONS} == set()

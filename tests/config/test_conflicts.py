"""Settings of missing extensions, and the rows of settings that exclude each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig, Qwen3VLConfig

from colograd.config import GRPOConfig, ModelConfig, ScriptArguments
from colograd.config.conflicts import tables
from colograd.config.knob import rules_of
from colograd.extensions import EXTENSIONS
from colograd.policy.supported import Wanted, check_installed
from colograd.runtime import registry

GROUPS = (GRPOConfig, ModelConfig, ScriptArguments)


@pytest.fixture
def without_extensions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that every extension's folder is missing."""
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
        (lambda: GRPOConfig(router_replay=True), "`router_replay: true` needs the extension `experts`"),
        (lambda: GRPOConfig(overlap="auto"), "`overlap: 'auto'` needs the extension `overlap`"),
        (lambda: GRPOConfig(sharding="tensor"), "`sharding: 'tensor'` needs the extension `tensor_parallel`"),
        (lambda: GRPOConfig(sharding="fsdp"), "`sharding: 'fsdp'` needs the extension `fsdp`"),
        (lambda: GRPOConfig(gradient_checkpointing="offload"), "offload` needs the extension `offload`"),
        (lambda: GRPOConfig(carry_over=0.8), "`carry_over: 0.8` needs the extension `carry_over`"),
        (lambda: ModelConfig(load_in_4bit=True), "`load_in_4bit: true` needs the extension `quantized`"),
        (lambda: GRPOConfig(kl_in_reward=0.1), "`kl_in_reward: 0.1` needs the extension `reward_kl`"),
        (lambda: GRPOConfig(use_liger_kernel=True), "`use_liger_kernel: true` needs the extension `liger`"),
        (lambda: GRPOConfig(optim="muon"), "`optim: 'muon'` needs the extension `muon`"),
        (lambda: GRPOConfig(offload_optimizer="stream"), "`offload_optimizer: 'stream'` needs the extension `offload`"),
        (lambda: GRPOConfig(offload_gradients=True), "`offload_gradients: true` needs the extension `offload`"),
        (lambda: GRPOConfig(curriculum={"solved_at": 1.0}), "needs the extension `curriculum`"),
        (lambda: GRPOConfig(sequence_parallel_size=2), "needs the extension `sequence_parallel`"),
        (lambda: GRPOConfig(freeze_vision_tower=True), "needs the extension `images`"),
        (lambda: GRPOConfig(teacher_model_name_or_path="m"), "needs the extension `distillation`"),
        (lambda: GRPOConfig(dynamic_sampling=True), "`dynamic_sampling: true` needs the extension `dynamic_sampling`"),
        (lambda: GRPOConfig(metric_for_best_model="kl"), "metric_for_best_model: kl` needs the extension `best_model`"),
        (lambda: GRPOConfig(agent_timeout=1.0), "`agent_timeout: 1.0` needs the extension `agents`"),
        (lambda: ScriptArguments(tools=["my:tool"]), "needs the extension `tools`"),
        (lambda: ScriptArguments(exams=["gsm8k"]), r"`exams: \['gsm8k'\]` needs the extension `evaluation`"),
    ],
)
def test_settings_of_missing_extensions_are_refused(make: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: ())
    with pytest.raises(ValueError, match=said) as raised:
        make()
    assert "is missing: restore that folder, or remove the setting." in str(raised.value)


def settings_of(folder: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(folder), report_to="none", **options)


@pytest.mark.parametrize(
    ("model_config", "options", "said"),
    [
        (MixtralConfig(), {}, "mixtral, a mixture of experts, needs the extension `experts`"),
        (Qwen3VLConfig(), {}, "qwen3_vl, a model that reads images, needs the extension `images`"),
        (
            LlamaConfig(),
            {"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}},
            "llama, on a quantised base, needs the extension `quantized`",
        ),
    ],
)
def test_models_of_missing_extensions_are_refused(
    model_config: Any, options: dict[str, Any], said: str, without_extensions: None, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        check_installed(Wanted(model_config, settings_of(tmp_path, **options), None, True, False))
    assert "is missing: restore that folder, or choose a different model." in str(raised.value)


def test_plain_model_needs_no_extension(without_extensions: None, tmp_path: Path) -> None:
    check_installed(Wanted(LlamaConfig(), settings_of(tmp_path), None, True, False))


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

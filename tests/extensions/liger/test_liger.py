"""Liger's kernels: a missing one is an error; their results equal the plain ones; on a GPU they train packed rows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from layer_cases import make_rows, trained
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from colograd.extensions.liger import kernels as liger
from colograd.extensions.liger.kernels import Liger, apply_liger
from colograd.policy.row_proof import choose_rows
from colograd.policy.supported import Wanted

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def make_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch):
    """Fake liger-kernel, because the real one needs a GPU. It records its arguments and may scale the last norm's
    output."""
    told: list[dict[str, Any]] = []
    factor = [1.0]

    def apply(rope: bool = True, cross_entropy: bool = False, rms_norm: bool = True, model: Any = None) -> None:
        told.append({"rope": rope, "cross_entropy": cross_entropy, "rms_norm": rms_norm, "model": model})
        modeling_llama.LlamaRMSNorm = torch.nn.RMSNorm  # as Liger does for models to come
        own = model.model.norm.forward
        model.model.norm.forward = lambda hidden: factor[0] * own(hidden)

    package = ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", modeling_llama.LlamaRMSNorm)
    return told, factor


def settings(device: torch.device = CPU, **given: bool) -> Any:
    return SimpleNamespace(device=device, liger_kernel_config=given)


def wanted(config: Any) -> Wanted:
    return Wanted(None, config, "", False, False)


def test_there_are_none_on_a_cpu(tmp_path: Path) -> None:
    Liger().check(wanted(tiny.config(tmp_path)))
    with pytest.raises(ValueError, match="the policy trains on the CPU: set use_liger_kernel: false"):
        Liger().check(wanted(tiny.config(tmp_path, use_liger_kernel=True)))


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(ValueError, match=r"liger-kernel can't be imported \(.*\): pip install liger-kernel"):
        apply_liger(settings(), make_model())


def test_both_models_get_the_kernels_that_were_asked_for(patches: Any) -> None:
    told, _ = patches
    policy, reference, given = make_model(), make_model(), {"rope": False, "cross_entropy": False, "swiglu": True}
    with pytest.raises(ValueError, match="for 'llama' models liger-kernel knows the names rms_norm, rope: choose"):
        apply_liger(settings(**given), policy)
    del given["swiglu"]
    own = modeling_llama.LlamaRMSNorm
    undo = apply_liger(settings(**given, fused_linear_cross_entropy=False), policy, also=[reference])
    expected = {"rope": False, "cross_entropy": False, "rms_norm": True}
    assert told == [{**expected, "model": model} for model in (policy, reference)]
    assert modeling_llama.LlamaRMSNorm is not own
    undo()
    assert modeling_llama.LlamaRMSNorm is own


def test_another_result_than_the_models_own_is_an_error(patches: Any) -> None:
    _, factor = patches
    factor[0] = 1.5
    own = modeling_llama.LlamaRMSNorm
    with pytest.raises(ValueError, match=r"the log-probabilities of a LlamaForCausalLM differ by .* nats from those"):
        apply_liger(settings(), make_model())
    assert modeling_llama.LlamaRMSNorm is own


def test_a_model_that_it_does_not_know_is_refused(patches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_kernels", dict)
    with pytest.raises(ValueError, match="has no kernels for 'llama' models: set use_liger_kernel: false, or"):
        apply_liger(settings(), make_model())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_train_as_before_in_the_same_tensors(dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    device = torch.device("cuda")
    model = make_model().to(device, dtype)
    rows = make_rows(device)
    assert choose_rows(model) == ""
    expected = [trained(model.train(), row).float() for row in rows]
    places = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    undo = apply_liger(settings(device, cross_entropy=False, fused_linear_cross_entropy=False), model)
    try:
        assert "Liger" in repr(model) and choose_rows(model) == ""
        for row, own in zip(rows, expected, strict=True):
            found = trained(model.train(), row).float()
            assert float((found - own).norm() / own.norm()) < (1e-4 if dtype == torch.float32 else 0.05)
        assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == places
    finally:
        undo()

"""Policies in the engine's tensor-parallel layout: the same weights as on one rank, in the memory of vLLM's ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from engine_ranks import (
    FIGURES,
    SETTINGS,
    check_adapters_end_alike,
    check_ends_alike,
    check_fault_ends_all,
    check_smaller_rows_where_memory_lacks_alike,
    results,
    run,
)
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from colograd.config.conflicts import check_conflicts
from colograd.extensions.tensor_parallel.model import check_policy
from colograd.parallel.balance import plan, share_out
from colograd.parallel.shards import Shard
from colograd.policy.lora import Adapter, wrap
from colograd.policy.supported import check_supported
from colograd.sharding import optimizer_state
from colograd.sharding.strategy import Owned
from colograd.sharding.weight_files import WeightFiles


def check_in_parts(model: Path, folder: Path, ranks: int, size: int, sharding: str, **changes: Any) -> list[dict]:
    """``ranks`` ranks with engines over ``size`` ranks each train the same as one rank."""
    settings = SETTINGS | changes
    (alone,) = run(model, folder, 1, **settings)
    found = run(model, folder, ranks, vllm_tensor_parallel_size=size, sharding=sharding, **settings)
    check_ends_alike(model, folder, ranks)
    for one, other in zip(alone["logs"], found[0]["logs"], strict=True):
        assert {k: other[k] for k in FIGURES} == pytest.approx({k: one[k] for k in FIGURES}, abs=1e-5, rel=1e-5)
    kept = {tensor.data_ptr(): tensor.numel() for tensor in torch.load(folder / "weights0-of-1.pt").values()}
    elements = sum(kept.values())  # a tied head is the embedding
    for rank in found:
        assert rank["shared"] == rank["parameters"] > 0, "every parameter is the engine's tensor"
        assert 0 < rank["parity"] < 1e-5 and "0 bytes per publish" in rank["weights"]
        assert all(log["sync/published_bytes"] == 0 for log in rank["logs"])
        # A rank holds more than its share: norms, replicated heads, a vocabulary padded to multiples of 64.
        assert rank["policy"] < 4 * elements * (1 / size + 0.15)
        assert rank["state"] < 8 * elements * ((1 / ranks if "+" in sharding else 1 / size) + 0.15)
    return found


@pytest.mark.engine
def test_two_ranks_have_a_policy_in_parts(tiny_model: Path, tmp_path: Path) -> None:
    """A tied head, one key-value head that both have, a vocabulary that is filled up: 160 entries and 98."""
    check_in_parts(tiny_model, tmp_path, 2, 2, "tensor")


CASES: list[tuple[str, int, int, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", 4, 2, "tensor+optimizer", {}, {}),
    ("qwen2", 2, 2, "tensor", {"tied": False}, {"beta": 0.1}),
    ("qwen3", 4, 2, "tensor+gradients", {"tied": False}, {"gradient_checkpointing": True}),
    ("qwen3", 4, 4, "tensor", {"heads": 4, "keys": 2}, {"top_entropy_quantile": 0.5, "max_tokens_per_microbatch": 150}),
    ("gemma3", 2, 2, "tensor", {"keys": 2}, {}),
    ("qwen3_moe", 4, 2, "tensor+optimizer", {"tied": False}, {"router_aux_loss_coef": 0.0}),
    ("lfm2", 2, 2, "tensor", {}, {}),
]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("family", "ranks", "size", "sharding", "shape", "changes"), CASES)
def test_other_families_and_what_engines_share_out(
    tmp_path: Path, family: str, ranks: int, size: int, sharding: str, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = tiny.make_model(tmp_path / "model", family, **shape)
    check_in_parts(model, tmp_path, ranks, size, sharding, **changes)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("ranks", "size", "sharding", "keys"), [(2, 2, "tensor", 1), (4, 2, "tensor+gradients", 2), (4, 4, "tensor", 2)]
)
def test_adapter_is_cut_as_its_base(tmp_path: Path, ranks: int, size: int, sharding: str, keys: int) -> None:
    """Layers cut by outputs and by inputs, heads that several ranks have; a resume on one rank, and from one."""
    from transformers import AutoModelForCausalLM

    model = tiny.make_model(tmp_path / "model", "qwen3", heads=4, keys=keys)
    settings = SETTINGS | {"lora": True, "learning_rate": 1e-2}
    (alone,) = run(model, tmp_path, 1, **settings)
    found = run(model, tmp_path, ranks, vllm_tensor_parallel_size=size, sharding=sharding, **settings)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    start = wrap(loaded, LoraConfig(r=4, target_modules="all-linear"), 7).state_dict()
    for one, other in zip(alone["logs"], found[0]["logs"], strict=True):
        assert {k: other[k] for k in FIGURES} == pytest.approx({k: one[k] for k in FIGURES}, abs=1e-5, rel=1e-5)
    for rank in found:
        assert rank["shared"] == rank["parameters"] > 0, "the base is the engine's"
        assert 0 < rank["parity"] < 1e-5 and "the base is frozen and shared" in rank["weights"]
    check_adapters_end_alike(tmp_path, ranks, start)
    from_one = str(tmp_path / "run-1" / "checkpoint-3")
    from_parts = str(tmp_path / f"run-{ranks}" / "checkpoint-3")
    expected = (tmp_path / "weights0-of-1.pt").read_bytes()
    run(model, tmp_path, ranks, vllm_tensor_parallel_size=size, sharding=sharding, resume=from_one, **settings)
    check_adapters_end_alike(tmp_path, ranks, start)
    run(model, tmp_path, 1, resume=from_parts, journal="off", **settings)
    (tmp_path / "weights0-of-1.pt").rename(tmp_path / f"weights0-of-{ranks}.pt")
    (tmp_path / "weights0-of-1.pt").write_bytes(expected)
    check_adapters_end_alike(tmp_path, 1, start, of=ranks)


@pytest.mark.slow
@pytest.mark.engine
def test_checkpoint_resumes_with_any_ranks_and_layout(tiny_model: Path, tmp_path: Path) -> None:
    """Three steps on 4 ranks (two engines of 2), three more on 2 ranks (one engine) and on 1 rank; and back."""
    run(tiny_model, tmp_path, 1, **SETTINGS)
    two = {"vllm_tensor_parallel_size": 2, **SETTINGS}
    run(tiny_model, tmp_path, 4, sharding="tensor+gradients", **two)
    whole = tmp_path / "weights0-of-1.pt"
    kept = whole.read_bytes()
    of_four, of_one = (str(tmp_path / f"run-{ranks}" / "checkpoint-3") for ranks in (4, 1))
    for resumed in (of_four, of_one):
        run(tiny_model, tmp_path, 2, sharding="tensor", resume=resumed, **two)
        check_ends_alike(tiny_model, tmp_path, 2)
    (alone,) = run(tiny_model, tmp_path, 1, resume=of_four, journal="off", **SETTINGS)
    (tmp_path / "weights0-of-1.pt").rename(tmp_path / "weights1-of-2.pt")
    whole.write_bytes(kept)
    check_ends_alike(tiny_model, tmp_path, 2)
    assert len(alone["logs"]) == 6


@pytest.mark.slow
@pytest.mark.engine
def test_checkpoint_resumes_with_another_engine_size(tmp_path: Path) -> None:
    """Resume from an engine over 4 ranks with an engine over 2, which splits heads and vocabulary elsewhere."""
    model = tiny.make_model(tmp_path / "model", "qwen3", heads=4, keys=2)
    run(model, tmp_path, 1, **SETTINGS)
    run(model, tmp_path, 4, sharding="tensor", vllm_tensor_parallel_size=4, **SETTINGS)
    of_four = str(tmp_path / "run-4" / "checkpoint-3")
    run(model, tmp_path, 2, sharding="tensor", vllm_tensor_parallel_size=2, resume=of_four, **SETTINGS)
    check_ends_alike(model, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("fault", ["killed", "inside", "hangs"])
def test_rank_failing_in_a_forward_ends_all(tiny_model: Path, tmp_path: Path, fault: str) -> None:
    check_fault_ends_all(tiny_model, tmp_path, fault, vllm_tensor_parallel_size=2, sharding="tensor")


@pytest.mark.slow
@pytest.mark.engine
def test_ranks_that_lack_memory_alike_pack_smaller_rows(tiny_model: Path, tmp_path: Path) -> None:
    check_smaller_rows_where_memory_lacks_alike(tiny_model, tmp_path, vllm_tensor_parallel_size=2, sharding="tensor")
    assert all(rank["shared"] == rank["parameters"] for rank in results(tmp_path, 2))


def _model(model_type: str = "llama", **changes: Any) -> Any:
    return SimpleNamespace(config=AutoConfig.for_model(model_type, **changes))


@pytest.mark.parametrize(
    ("model", "adapter", "said"),
    [
        (
            _model("mistral"),
            None,
            "sharding is 'tensor', but mistral isn't among the models .* set sharding",
        ),
        (
            _model(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
            object(),
            "sharding is 'tensor', but the base is quantised, .* set sharding: gradients",
        ),
        (_model(attention_dropout=0.1), None, "the model's attention_dropout is 0.1, .* set disable_dropout: true"),
    ],
)
def test_models_without_engine_layout_are_named_at_start(model: Any, adapter: Any, said: str) -> None:
    settings = SimpleNamespace(sharding="tensor", tensor_parallel=True, disable_dropout=False, torch_compile=False)
    settings.router_replay = settings.use_liger_kernel = False
    settings.model_init_kwargs = None
    with pytest.raises(ValueError, match=said):
        check_supported(model, settings, adapter)


def test_merged_adapter_is_named_at_start() -> None:
    config: Any = SimpleNamespace(sharding="tensor", tensor_parallel=True)

    def adapted(why_merged: str) -> Any:
        return SimpleNamespace(adapter=Adapter("default", 4, ("q_proj",), why_merged))

    with pytest.raises(
        ValueError, match=r"sharding is 'tensor', but vLLM doesn't serve DoRA, .* set sharding: gradients"
    ):
        check_policy(adapted("vLLM doesn't serve DoRA"), config, samples=True)
    check_policy(adapted(""), config, samples=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"weights": "copied"},
            "weights is 'copied', but .* shares the engine's weights: set weights: auto",
        ),
        ({"torch_compile": True}, "torch_compile is true, but this version .* remove torch_compile"),
        ({"sync_ref_model": True, "beta": 0.1}, "sync_ref_model is true, but this version doesn't support both"),
        ({"vllm_engine_kwargs": {"dtype": "float16"}}, "vllm_engine_kwargs has dtype: 'float16', .* remove it"),
        (
            {"vllm_model_impl": "transformers"},
            "vllm_model_impl is 'transformers', .* set vllm_model_impl: auto",
        ),
    ],
)
def test_incompatible_settings_are_named_at_start(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, **changes)
    config.sharding, config.vllm_tensor_parallel_size = "tensor", 2  # without another rank
    with pytest.raises(ValueError, match=f"sharding is 'tensor' and {said}"):
        check_conflicts(config)


# -- parts of a tensor


def columns(place: int, ranks: int, shape: tuple[int, int] = (6, 8)) -> Shard:
    size = shape[1] // ranks
    return Shard.of_cuts(shape, [(slice(None), slice(place * size, (place + 1) * size))])


def halves(place: int, ranks: int) -> Shard:
    """Gates and ups of 3 experts, (3, 2 * 4, 5)."""
    size = 4 // ranks
    return Shard.of_cuts((3, 8, 5), [(slice(None), slice(s + place * size, s + (place + 1) * size)) for s in (0, 4)])


@pytest.mark.parametrize("part", [columns, halves])
def test_parts_make_up_the_tensor(part: Any) -> None:
    whole = torch.randn(part(0, 2).shape)
    copy = torch.zeros_like(whole)
    for place in range(2):
        shard = part(place, 2)
        assert shard.begin is None and not shard.is_whole and shard.of(whole).shape == shard.local_shape
        assert Shard.from_json(json.loads(json.dumps(shard.as_json()))) == shard
        shard.write(shard.of(whole), copy)
    assert torch.equal(copy, whole)


def test_rows_are_one_range() -> None:
    rows = Shard.of_cuts((6, 8), [(slice(2, 4),)])
    assert rows.begin == 16 and rows.local_shape == (2, 8)
    assert Shard.of_cuts((6,), [()]).is_whole and Shard.of_cuts((), [()]).begin == 0


def test_state_is_read_in_other_parts(tmp_path: Path) -> None:
    """Written by 2 places of 2 ranks each, read whole, by 4 places, and by the same."""
    whole = torch.nn.Parameter(torch.randn(6, 8))
    expected = torch.randn(6, 8)

    def optimizer(owned: list[Owned]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([piece.part for piece in owned])

    def owned(place: int, ranks: int, start: int = 0, stop: int | None = None) -> list[Owned]:
        shard = columns(place, ranks)
        local = shard.of(whole.detach()).contiguous()
        part = nn.Parameter(local.view(-1)[start:stop])
        return [Owned("o_proj.weight", part, start, local.numel() if stop is None else stop, shard)]

    for rank, (place, ends) in enumerate((place, ends) for place in (0, 1) for ends in ((0, 10), (10, 24))):
        own = owned(place, 2, *ends)
        wrote = optimizer(own)
        wrote.state[own[0].part] = {"exp_avg": own[0].of(expected).clone(), "step": torch.tensor(3.0)}
        optimizer_state.save(wrote, own, tmp_path, rank, 4)
    for own in ([Owned("o_proj.weight", whole, 0, 48)], owned(3, 4), owned(1, 2)):
        read = optimizer(own)
        optimizer_state.load(read, own, tmp_path)
        state = read.state[own[0].part]
        assert torch.equal(state["exp_avg"], own[0].of(expected)) and state["step"] == 3
    (tmp_path / "optimizer-00003-of-00004.safetensors").unlink()
    with pytest.raises(ValueError, match=r"optimizer-00003-of-00004.safetensors is missing"):
        optimizer_state.load(read, own, tmp_path)


def test_parts_of_weights_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colograd.sharding.weight_files.MOST_ELEMENTS", 16)
    saved = {"o_proj.weight": torch.randn(6, 8), "experts.gate_up_proj": torch.randn(3, 8, 5), "norm": torch.randn(8)}
    save_file(saved, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    for place in range(2):
        parts = (columns(place, 2), halves(place, 2), Shard.of_cuts((8,), [()]))
        for (name, whole), shard in zip(saved.items(), parts, strict=True):
            found = torch.empty(shard.local_shape)
            files.copy_part([name], found, shard)
            assert torch.equal(found, shard.of(whole))


def test_ranks_of_an_engine_train_the_same_groups() -> None:
    """In an engine of 2 ranks the first rank samples all groups. Training moves groups to the engine with less work."""
    costs = [[5.0, 5.0, 1.0], [], [1.0], []]
    kept = share_out(costs, 2, ranks_per_row=2)
    assert kept == [[(0, 0), (0, 1), (0, 2)], [(2, 0)]]
    moved = plan(costs, 2, ranks_per_row=2)
    assert sorted(moved[0] + moved[1]) == sorted(kept[0] + kept[1])
    assert sum(costs[owner][index] for owner, index in moved[0]) < 8


def test_ranks_of_a_row_train_the_same_groups() -> None:
    """2 teams of 2 ranks with an engine each, of 4 ranks over two engines of 2, and 2 in one engine of 4."""
    costs = [[5.0], [1.0, 1.0], [2.0], [1.0]]
    assert share_out(costs, 1, ranks_per_row=2) == [[(0, 0), (1, 0), (1, 1)], [(2, 0), (3, 0)]]
    assert share_out(costs, 2, ranks_per_row=4) == [[(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]]
    assert share_out([[5.0, 2.0, 4.0], [], [], []], 4, ranks_per_row=2) == [[(0, 0)], [(0, 1), (0, 2)]]

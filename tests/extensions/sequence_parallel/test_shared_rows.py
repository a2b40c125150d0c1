"""Sequence parallelism: ranks that divide each row's tokens have the results and final weights of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launcher
import pytest
import tiny
from engine_ranks import (
    FIGURES,
    SETTINGS,
    check_adapters_end_alike,
    check_ends_alike,
    check_fault_ends_all,
    check_smaller_rows_where_memory_lacks_alike,
    run,
)
from paths import SCRIPTS

from colograd.config.conflicts import check_conflicts
from colograd.extensions.sequence_parallel.conflicts import check_sequences
from colograd.policy.supported import check_shared_rows

SOME = ("qwen3_moe", "gpt_oss", "six heads, three of keys", "trees", "lfm2", "qwen3_5", "granitemoehybrid")


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, SOME), *(pytest.param(ranks, (), marks=pytest.mark.slow) for ranks in (2, 4))]
)
def test_divided_rows_have_whole_rows_gradients(tmp_path: Path, ranks: int, cases: tuple[str, ...]) -> None:
    """Windows, sinks, soft caps, experts with their load-balancing loss, adapters, trees; 3, 4 and 6 heads with 1, 2
    and 3 of keys and values; short convolutions, Gated DeltaNet, Mamba-2; rows with fewer tokens than ranks. Float32
    rounds by about 1e-7."""
    done = launcher.run(SCRIPTS / "sequence_ranks.py", tmp_path, *cases, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]
    assert all(rank["alike"] for rank in found), "every rank computes the same loss, to the last bit"
    for whole, part in (rank["held"] for rank in found):
        assert part < 1.1 * whole / ranks, "of activations a rank keeps its share"
    for off, buckets in (rank["experts"] for rank in found):
        assert off < 1e-5 and buckets > 10, "with sharding: gradients, where a rank has no token for an expert"
    assert all(rank["walks"] == [1, 2] for rank in found), "a dense model's graph is looked at once, a mixture's always"
    for name, case in found[0]["cases"].items():
        assert 0 <= case["forward"] < 1e-5 and case["gradient"] < 1e-5, name
        labels = [rank["cases"][name]["labels"] for rank in found]
        assert sum(labels) == case["all_labels"] and max(labels) < case["all_labels"], "each computes some logits"


def check_shared_rows_train_alike(model: Path, folder: Path, ranks: int, size: int, **changes: Any) -> list[dict]:
    """``ranks`` ranks, in teams of ``size`` that divide each row's tokens, train the same as one rank."""
    alone_only = ("sharding", "vllm_tensor_parallel_size")
    (alone,) = run(model, folder, 1, **SETTINGS | {k: v for k, v in changes.items() if k not in alone_only})
    found = run(model, folder, ranks, sequence_parallel_size=size, **SETTINGS | changes)
    for one, other in zip(alone["logs"], found[0]["logs"], strict=True):
        assert {k: other[k] for k in FIGURES} == pytest.approx({k: one[k] for k in FIGURES}, abs=1e-5, rel=1e-5)
    assert len({rank["trained"] for rank in found[:size]}) == 1, "they train the same rows"
    assert all(0 < rank["parity"] < 1e-5 for rank in found)
    return found


@pytest.mark.slow  # the test above has their gradients
@pytest.mark.engine
def test_two_ranks_share_rows_out(tiny_model: Path, tmp_path: Path) -> None:
    found = check_shared_rows_train_alike(tiny_model, tmp_path, 2, 2, sharding="gradients")
    check_ends_alike(tiny_model, tmp_path, 2)
    for rank in found:
        assert rank["shared"] == rank["parameters"] > 0, "every parameter is the engine's tensor"
        assert all(log["sync/published_bytes"] == 0 for log in rank["logs"])


TENSOR = {"vllm_tensor_parallel_size": 2}
CASES: list[tuple[str, int, int, dict[str, Any], dict[str, Any]]] = [
    ("llama", 2, 2, {}, {"sharding": "none"}),
    ("llama", 2, 2, {}, {"sharding": "optimizer", "top_entropy_quantile": 0.5, "max_tokens_per_microbatch": 150}),
    ("qwen2", 4, 2, {"tied": False}, {"sharding": "gradients", "beta": 0.1}),
    ("qwen3", 4, 4, {"heads": 4, "keys": 2}, {"sharding": "none", "gradient_checkpointing": True}),
    ("gemma3", 2, 2, {"keys": 2}, {"sharding": "none"}),
    ("qwen3_moe", 2, 2, {"tied": False}, {"sharding": "optimizer"}),
    ("llama", 4, 2, {"heads": 4, "keys": 2}, {"sharding": "tensor", **TENSOR}),
    ("qwen3", 4, 2, {"heads": 4, "keys": 2}, {"sharding": "tensor+optimizer", **TENSOR}),
    ("llama", 4, 2, {"heads": 4, "keys": 2}, {"sharding": "tensor+gradients", **TENSOR}),
    ("llama", 4, 2, {}, {"sharding": "gradients", **TENSOR}),
    ("lfm2", 2, 2, {}, {"sharding": "gradients"}),
    ("lfm2", 4, 4, {}, {"sharding": "none", "gradient_checkpointing": True}),
    ("lfm2", 4, 2, {}, {"sharding": "tensor+gradients", **TENSOR}),
]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("family", "ranks", "size", "shape", "changes"), CASES)
def test_other_families_and_ways(
    tmp_path: Path, family: str, ranks: int, size: int, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = tiny.make_model(tmp_path / "model", family, **shape)
    check_shared_rows_train_alike(model, tmp_path, ranks, size, **changes)
    check_ends_alike(model, tmp_path, ranks)


@pytest.mark.slow
@pytest.mark.engine
def test_an_adapter(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from colograd.policy.lora import wrap

    model = tiny.make_model(tmp_path / "model", "qwen3")
    check_shared_rows_train_alike(model, tmp_path, 2, 2, lora=True, learning_rate=1e-2)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = wrap(loaded, LoraConfig(r=4, target_modules="all-linear"), 7).state_dict()
    check_adapters_end_alike(tmp_path, 2, before)


@pytest.mark.slow
@pytest.mark.engine
def test_checkpoint_resumes_with_any_ranks_and_parts(tmp_path: Path) -> None:
    """Three steps with T = 2 and S = 2, three more on 2 ranks of a row and on 1; and three of 1 on T x S."""
    model = tiny.make_model(tmp_path / "model", "llama", heads=4, keys=2)
    run(model, tmp_path, 1, **SETTINGS)
    expected = (tmp_path / "weights0-of-1.pt").read_bytes()
    both = {"sequence_parallel_size": 2, "sharding": "tensor+gradients", **TENSOR, **SETTINGS}
    run(model, tmp_path, 4, **both)
    of_four, of_one = (str(tmp_path / f"run-{ranks}" / "checkpoint-3") for ranks in (4, 1))
    run(model, tmp_path, 2, sequence_parallel_size=2, sharding="gradients", resume=of_four, **SETTINGS)
    check_ends_alike(model, tmp_path, 2)
    run(model, tmp_path, 4, resume=of_one, **both)
    check_ends_alike(model, tmp_path, 4)
    run(model, tmp_path, 1, resume=of_four, journal="off", **SETTINGS)
    (tmp_path / "weights0-of-1.pt").rename(tmp_path / "weights1-of-2.pt")
    (tmp_path / "weights0-of-1.pt").write_bytes(expected)
    check_ends_alike(model, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("fault", ["killed", "inside", "hangs", "loss"])
def test_rank_failing_in_a_forward_ends_all(tiny_model: Path, tmp_path: Path, fault: str) -> None:
    check_fault_ends_all(tiny_model, tmp_path, fault, sequence_parallel_size=2, sharding="none")


@pytest.mark.slow
@pytest.mark.engine
def test_ranks_that_lack_memory_alike_pack_smaller_rows(tiny_model: Path, tmp_path: Path) -> None:
    check_smaller_rows_where_memory_lacks_alike(tiny_model, tmp_path, sequence_parallel_size=2, sharding="none")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"size \(3\) must divide the number of ranks per machine, 4: set .* to one of 1, 2, 4\."),
        ({"sequence_parallel_size": 4, "tensor": 2}, r"\(4\) times vllm_tensor_parallel_size \(2\) must divide .*1, 2"),
        ({"sequence_parallel_size": 2, "sharding": "fsdp"}, "sharding is 'fsdp', but this version .* set sharding"),
        ({"sequence_parallel_size": 2, "torch_compile": True}, "torch_compile is true, .* remove torch_compile"),
        ({"sequence_parallel_size": 2, "router_replay": True}, "router_replay is true, .* remove router_replay"),
    ],
)  # fmt: skip
def test_incompatible_settings_are_named_at_start(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path)
    monkeypatch.setattr(type(config), "world_size", 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config.sequence_parallel_size = 3
    if size := changes.pop("tensor", 0):
        config.sharding, config.vllm_tensor_parallel_size = "tensor", size
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=said):
        check_sequences(config)
        check_conflicts(config)


def test_models_with_undividable_rows_are_named_at_start() -> None:
    import row_cases

    dense, hybrid = row_cases.PACKED["llama"](), row_cases.RECURRENT["falcon_h1"]()
    for model in (dense, *(row_cases.RECURRENT[name]() for name in ("lfm2", "qwen3_5", "granitemoehybrid"))):
        check_shared_rows(model, 2, "")
    with pytest.raises(ValueError, match=r"is 2, but FalconH1ForCausalLM has layers of .*FalconH1Mixer.* to 1"):
        check_shared_rows(hybrid, 2, "")
    with pytest.raises(ValueError, match=r"rows of LlamaForCausalLM are padded \(a reason\)"):
        check_shared_rows(dense, 2, "a reason")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
    ],
)
def test_frequencies_that_the_last_position_chooses_are_refused(rope: dict[str, Any]) -> None:
    """A rank that has only the row's first tokens would choose other frequencies."""
    import row_cases

    model = row_cases.PACKED["llama"]()
    for kind in ("linear", "llama3", "yarn"):
        model.config.rope_parameters = {"rope_type": kind, "factor": 2.0}
        check_shared_rows(model, 2, "")
    model.config.rope_parameters = rope
    with pytest.raises(ValueError, match=r"is 2, but LlamaForCausalLM chooses its rotary frequencies .* to 1"):
        check_shared_rows(model, 2, "")

"""Engines over several ranks next to complete policies on each rank: the same rollouts leave the same weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_images
import torch
from engine_ranks import TWO, results, run, start
from image_cases import OTHERS
from torch import nn

from colograd.engine.tensors import VLLMTensors
from colograd.weights.mapping import Slice, UnmappedParameter, map_parameters


def weights(folder: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"weights{rank}-of-{ranks}.pt") for rank in range(ranks)]


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def check_alike(model: Path, folder: Path, engines: int, size: int, sharding: str = "none") -> list[dict]:
    """``engines`` of ``size`` ranks train as one rank does."""
    split = {"vllm_tensor_parallel_size": size, "sharding": sharding}
    (alone,), ranks = run(model, folder, 1), run(model, folder, engines * size, **split)
    (expected,), found = weights(folder, 1), weights(folder, engines * size)
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    moved = {name: value - before[name] for name, value in expected.items()}
    apart = {name: found[0][name] - value for name, value in expected.items()}
    assert norm(apart.values()) < 1e-4 * norm(moved.values())
    for name in expected:  # AdamW moves even a bias with a gradient of rounding errors
        assert moved[name].norm() > 0 and apart[name].norm() < 1e-3 * moved[name].norm(), name
        assert all(torch.equal(other[name], found[0][name]) for other in found), f"{name} differs between ranks"
    assert max(rank["parity"] for rank in ranks) < 1e-5 and min(rank["parity"] for rank in ranks) > 0
    asking = [rank["asked"] for rank in ranks if rank["asked"]]
    assert len(asking) == engines
    asked = [sorted(itertools.chain(*(texts for _, texts in calls))) for calls in zip(*asking, strict=True)]
    assert asked == [texts for _, texts in alone["asked"]]
    same = ("reward", "completions/mean_length", "num_tokens", "rewards/reward/std", "frac_reward_zero_std", "loss")
    for one, other in zip(alone["logs"], ranks[0]["logs"], strict=True):
        assert {name: other[name] for name in same} == pytest.approx({name: one[name] for name in same}, abs=1e-5)
    assert {rank["counted"] for rank in ranks} == {alone["counted"]}
    return ranks


@pytest.mark.slow  # test_tensor_layout.py splits the policy as well
@pytest.mark.engine
def test_two_ranks_of_one_engine_train_as_one_rank_does(tiny_model: Path, tmp_path: Path, tried: Any) -> None:
    """One key head that both have, a tied head, a vocabulary that is filled up: 160 rows and 98."""
    ranks = check_alike(tiny_model, tmp_path, engines=1, size=2)
    assert ranks[0]["called"] > 0 == ranks[1]["called"] and ranks[1]["asked"] == [], "the leader asks and judges"
    shares = [rank["trained"] for rank in ranks]
    assert min(shares) > 0.3 * sum(shares), "both train"
    whole = sum(p.numel() * 4 for p in weights(tmp_path, 1)[0].values())
    assert ranks[0]["engine"] < 0.65 * whole
    checkpoint = tmp_path / "run-2" / "checkpoint-3"
    assert [path.name for path in checkpoint.glob("lengths_*")] == ["lengths_0.json"]
    tried("llama", "tensor_parallel")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("engines", "size", "family", "tied", "heads", "keys", "sharding"),
    [
        (2, 2, "qwen3", False, 4, 2, "gradients"),
        (1, 4, "qwen3", True, 4, 2, "optimizer"),
        (1, 2, "qwen2", False, 2, 1, "none"),
        (1, 2, "llama", True, 4, 2, "fsdp"),
    ],
)
def test_other_shapes_and_engines_train_as_one_rank_does(
    tmp_path: Path, engines: int, size: int, family: str, tied: bool, heads: int, keys: int, sharding: str, tried: Any
) -> None:
    model = tiny.make_model(tmp_path / "model", family, tied=tied, heads=heads, keys=keys)
    check_alike(model, tmp_path, engines, size, sharding)
    tried(family, "tensor_parallel")


@pytest.mark.slow
@pytest.mark.engine
def test_all_ranks_name_a_parameter_copied_on_one(tiny_model: Path, tmp_path: Path) -> None:
    done = start("detached_ranks.py", 2, tiny_model, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"detached-{rank}.json").read_text()) for rank in range(2)]
    assert all(told["alone"] == ["model.norm.weight"] and told["parameters"] == 20 for told in ranks)
    assert all(len(told["errors"]) == 4 for told in ranks)
    assert all(f"({name})" in error for told in ranks for name, error in told["errors"].items())


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("changes", [{}, {"lora": True}, {"sharding": "fsdp"}], ids=["whole", "adapter", "in rows"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe"])
def test_a_mixture_of_experts_in_parts_is_the_same(
    family: str, changes: dict[str, Any], tmp_path: Path, tried: Any
) -> None:
    """The load-balancing loss is off, because it is a product of means over each rank's own tokens."""
    model = tiny.make_model(tmp_path / "model", family, tied=False)
    settings = {"router_aux_loss_coef": 0.0, **changes}
    (alone,) = run(model, tmp_path, 1, **{name: value for name, value in settings.items() if name != "sharding"})
    ranks = run(model, tmp_path, 2, **TWO, **settings)
    assert max(rank["parity"] for rank in ranks) < 1e-5
    for one, other in zip(alone["logs"], ranks[0]["logs"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    tried(family, "tensor_parallel")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", ["gemma3_vl", "idefics3", *OTHERS])
def test_a_model_that_sees_in_parts_samples_and_trains_the_same(family: str, tmp_path: Path, tried: Any) -> None:
    """The vision tower is split too. Only the first rank adds the biases of outputs that are summed over ranks."""
    model = tiny_images.make_model(tmp_path / "model", family)
    (alone,) = run(model, tmp_path, 1, sampled=True)
    ranks = run(model, tmp_path, 2, sampled=True, **TWO)
    (expected,), found = weights(tmp_path, 1), weights(tmp_path, 2)
    for rank in ranks:
        assert rank["parity"] < 1e-5 and rank["completions"] == alone["completions"]
    for one, other in zip(alone["logs"], ranks[0]["logs"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5) and other["reward"] == one["reward"]
    for name, value in expected.items():
        most = 1e-2 if name.endswith("k_proj.bias") else 1e-4  # outputs don't depend on the tower's key biases
        assert float((found[0][name] - value).norm()) < most * float(value.norm()), name
        assert torch.equal(found[1][name], found[0][name]), name
    assert ranks[0]["engine"] < 0.75 * alone["engine"]
    tried(family, "tensor_parallel")


@pytest.mark.slow
@pytest.mark.engine
def test_an_adapter_is_merged_on_its_way_into_the_parts(tiny_model: Path, tmp_path: Path) -> None:
    (alone,), ranks = run(tiny_model, tmp_path, 1, lora=True), run(tiny_model, tmp_path, 2, lora=True, **TWO)
    assert max(rank["parity"] for rank in ranks) < 1e-5
    for one, other in zip(alone["logs"], ranks[0]["logs"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3) and one["grad_norm"] > 0
    assert "the adapter is merged on its way into the engine's copy: ranks share the engine" in ranks[0]["weights"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("reward", "the judge of rank 0 is out"),
        ("loss", "The loss of step 2, micro-batch 1 is nan"),
    ],
)
def test_what_fails_on_one_rank_of_an_engine_ends_both(tiny_model: Path, tmp_path: Path, fault: str, told: str) -> None:
    done = start("same_rollouts.py", 2, tiny_model, tmp_path, json.dumps(TWO), fault)
    assert done.returncode != 0 and done.stderr.count(told) >= 2 and "RankError" in done.stderr, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.engine
def test_a_rank_of_an_engine_without_memory_makes_both_pack_smaller_rows(tiny_model: Path, tmp_path: Path) -> None:
    done = start("same_rollouts.py", 2, tiny_model, tmp_path, json.dumps(TWO), "memory")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ran out of memory and is repeated" in done.stdout
    (alone,) = run(tiny_model, tmp_path, 1)
    losses = [[entry["loss"] for entry in rank["logs"]] for rank in (alone, results(tmp_path, 2)[0])]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


# -- which part of a parameter a rank has


class Part(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Module()
        for name, shape in shapes.items():
            self.layer.add_module(name, nn.Module())
            self.layer.get_submodule(name).weight = nn.Parameter(torch.zeros(shape))


def cuts(policy: Part, engine: Part, ranks: int) -> list[dict[str, Slice]]:
    """The slices of each rank, by the parameter."""
    found = []
    for place in range(ranks):
        parts = map_parameters(policy, VLLMTensors(engine), place, ranks)
        for part in parts:
            assert part.held.shape == part.destination.shape
        found.append({part.name.split(".")[1]: part for part in parts})
    return found


def rows_of(part: Slice) -> tuple[int, int]:
    """First row of each parameter in the policy and in the engine's tensor."""
    width = part.source.shape[1]
    return part.held.storage_offset() // width, part.destination.storage_offset() // width


def test_queries_are_split_and_keys_that_are_fewer_than_ranks_are_repeated() -> None:
    """8 query heads and 2 key heads of size 4, on 4 ranks: the first two have the first key head."""
    policy = Part(q_proj=(32, 6), k_proj=(8, 6), v_proj=(8, 6))
    ranks = cuts(policy, Part(qkv_proj=(16, 6)), 4)
    assert [rows_of(rank["q_proj"]) for rank in ranks] == [(0, 0), (8, 0), (16, 0), (24, 0)]
    assert [rows_of(rank["k_proj"]) for rank in ranks] == [(0, 8), (0, 8), (4, 8), (4, 8)]
    assert [rows_of(rank["v_proj"]) for rank in ranks] == [(0, 12), (0, 12), (4, 12), (4, 12)]


def test_each_fused_part_is_split_by_itself() -> None:
    ranks = cuts(Part(gate_proj=(6, 5), up_proj=(6, 5)), Part(gate_up_proj=(6, 5)), 2)
    assert [rows_of(rank["gate_proj"]) for rank in ranks] == [(0, 0), (3, 0)]
    assert [rows_of(rank["up_proj"]) for rank in ranks] == [(0, 3), (3, 3)]


def test_down_projection_splits_columns_and_norm_stays_whole() -> None:
    """Outputs of the down projection are added up over the ranks."""
    ranks = cuts(Part(down_proj=(4, 6), norm=(4,)), Part(down_proj=(4, 3), norm=(4,)), 2)
    assert [rank["down_proj"].cut for rank in ranks] == [(slice(None), slice(0, 3)), (slice(None), slice(3, 6))]
    assert [rank["norm"].cut for rank in ranks] == [(), ()]


def test_the_rows_that_fill_up_a_vocabulary_are_nobodys() -> None:
    """258 entries are filled up to 320: two ranks have 160 and 98, of eight the last one has none."""
    ranks = cuts(Part(embed_tokens=(258, 3)), Part(embed_tokens=(160, 3)), 2)
    assert [len(rank["embed_tokens"].held) for rank in ranks] == [160, 98]
    ranks = cuts(Part(embed_tokens=(258, 3)), Part(embed_tokens=(40, 3)), 8)
    assert [len(rank["embed_tokens"].held) for rank in ranks] == [40] * 6 + [18, 0]


def test_a_towers_fused_queries_keys_and_values_are_thirds() -> None:
    def tower(rows: int) -> nn.Module:
        model = nn.Module()
        model.visual = Part(qkv=(rows, 5))
        model.packed_modules_mapping = {"qkv": ["qkv"]}
        return model

    policy = tower(24)
    for place in range(2):
        parts = map_parameters(policy, VLLMTensors(tower(12)), place, 2)
        assert [rows_of(part) for part in parts] == [(4 * place, 0), (8 + 4 * place, 4), (16 + 4 * place, 8)]
    (whole,) = map_parameters(policy, VLLMTensors(tower(24)), 1, 2)
    assert whole.cut == ()


def test_what_each_rank_has_whole_is_not_split() -> None:
    ranks = cuts(Part(q_proj=(8, 6), k_proj=(8, 6), v_proj=(8, 6)), Part(qkv_proj=(24, 6)), 2)
    assert [rows_of(rank[name]) for rank in ranks for name in ("q_proj", "k_proj", "v_proj")] == 2 * [
        (0, 0), (0, 8), (0, 16)
    ]  # fmt: skip


def test_what_is_fused_in_the_checkpoint_already_is_not_guessed() -> None:
    with pytest.raises(UnmappedParameter, match="gate_up_proj"):
        map_parameters(Part(gate_up_proj=(12, 5)), VLLMTensors(Part(gate_up_proj=(6, 5))), 0, 2)

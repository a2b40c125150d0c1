"""FSDP2 gives the weights of one rank, each rank holds a share, and a failure on one rank reaches all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launcher
import pytest
import torch
from needs import needs
from paths import SCRIPTS

from colograd.extensions.fsdp.blocks import check_blocks
from colograd.policy.layers import decoder_layers

SCRIPT = SCRIPTS / "fsdp_ranks.py"
FAULTS = ("before", "forward", "backward", "forward memory", "backward memory")


def run(ranks: int, folder: Path, *case: str) -> list[dict[str, Any]]:
    done = launcher.run(SCRIPT, folder, *case, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """Unsharded."""
    return run(1, folder)[0]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def several(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    return run(request.param, folder)


def moved(folder: Path, name: str, ranks: int) -> torch.Tensor:
    start = torch.load(folder / "start.pt")[name == "tied"]
    weights = torch.load(folder / f"{name}-of-{ranks}.pt")
    assert weights.keys() == start.keys()
    return torch.cat([(weights[key] - start[key]).flatten() for key in start])


def check_alike(expected: torch.Tensor, found: torch.Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("case", ["plain", "checkpointing", "kept", "tied"])
def test_steps_leave_the_weights_of_one_rank(one, several, folder, case) -> None:
    """Activations may be recomputed, and gathered weights may stay until the backward."""
    check_alike(moved(folder, case, 1), moved(folder, case, len(several)))
    assert len({rank[name]["weights"] for rank in several for name in ("plain", "checkpointing", "kept")}) == 1
    assert several[0]["tied"]["weights"] != several[0]["plain"]["weights"]


@pytest.mark.slow
def test_compiled_steps_leave_the_weights_of_one_rank(one, folder, tmp_path) -> None:
    run(2, tmp_path, "compiled")
    check_alike(moved(folder, "plain", 1), moved(tmp_path, "compiled", 2))


@pytest.mark.parametrize("fault", FAULTS)
def test_failure_on_one_rank_fails_all_in_step(several, fault) -> None:
    """A failure inside a forward or backward reaches all ranks. The repeated step has the same bits."""
    place, _, memory = fault.partition(" ")
    what = "training" if place == "backward" else "the forward"
    text = "a loss of one's own failed" if place == "before" else "a kernel failed"
    kind, text = ("OutOfMemoryError", "no room") if memory else ("RuntimeError", text)
    for rank, found in enumerate(several):
        other = f"{kind if memory else 'RankError'}: Rank 1 failed in {what}: {kind}: {text}"
        assert found[fault]["said"] == (f"{kind}: {text}" if rank == 1 else other)
        assert found[fault]["weights"] == found["plain"]["weights"]


def test_second_model_is_cut_with_equal_output(several) -> None:
    assert [rank["frozen"] for rank in several] == [0.0] * len(several)


@needs("distillation")
def test_teacher_of_another_size_is_cut(several) -> None:
    """A teacher's head stays whole on each rank."""
    assert max(rank["taught"] for rank in several) < 1e-5


def test_offloaded_rows_are_gathered_from_locked_pages(several) -> None:
    for rank in several:
        assert rank["offloaded"]["in pages"] and rank["offloaded"]["weights"] == rank["plain"]["weights"]


def test_memory_is_a_share_and_a_few_blocks(one, several) -> None:
    """Weights 2, gradients 4 and optimizer state 10 bytes per parameter on one rank; a share of them each on several,
    and for the largest block (a layer, the head, an embedding that is both) its weights, the next one's, its gradients
    in float32, and their exchange."""
    deep = one["memory"][0]
    assert deep["peak"] == pytest.approx(16 * deep["parameters"], rel=0.02)
    for rank in several:
        for found in rank["memory"]:
            share = 16 * found["parameters"] / len(several)
            assert share < found["peak"] <= 1.01 * share + 16 * max(found["block"], found["head"])


# -- models that FSDP can split


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=3,
                                        num_attention_heads=1, **changes))  # fmt: skip


def test_blocks_are_named_layers_or_the_longest_list() -> None:
    model = llama()
    assert decoder_layers(model) == list(model.model.layers)
    own = torch.nn.Module()
    own.short = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    own.long = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    assert decoder_layers(own) == list(own.long)


def test_scalars_and_mixed_dtypes_are_refused() -> None:
    model = llama()
    model.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"scale is a single number\. Set sharding: gradients"):
        check_blocks(model, decoder_layers(model))
    model = llama()
    model.model.layers[1].mlp.bfloat16()
    with pytest.raises(
        ValueError, match=r"LlamaDecoderLayer mixes the dtypes bfloat16 and float32, but `sharding: fsdp`"
    ):
        check_blocks(model, decoder_layers(model))

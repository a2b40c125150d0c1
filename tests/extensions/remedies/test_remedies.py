"""Remedies for a run that doesn't fit: the changes that an error names, each tried on the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import large
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.config import GRPOConfig
from colograd.memory import description as memory
from colograd.memory.choice import auto, best_plan, fits, plan_or_raise, remedies, too_large
from colograd.memory.description import STRATEGIES, RunDescription, Workload, describe_run
from colograd.memory.shape import Lengths
from colograd.memory.table import GIB, PHASES, MemoryPlan


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large.folder(tmp_path_factory.mktemp("qwen"))


def test_what_does_not_fit_is_one_error_with_what_would(qwen: Path) -> None:
    run = large.run(qwen, ranks=1, sleeps=True, offloads=True)
    plan = dataclasses.replace(best_plan(run, "none"), remedies=remedies(run, "none"))
    said, head, *table = too_large(run, plan).splitlines()
    assert said.startswith("Training takes ") and " GiB more than the 80.00 GiB of a GPU; what would fit: " in said
    assert "use_peft: true (LoRA, rank 16)" in said and "2 ranks with sharding: gradients" in said
    assert "vllm_max_model_length" not in said, "weights, gradients and state alone are too large"
    assert head.split()[-2:] == list(PHASES) and table[-1].split()[0] == "remains"


def test_each_remedy_is_tried(qwen: Path) -> None:
    assert "sharding: optimizer over the 8 ranks" in remedies(large.run(qwen), "none")
    long = large.run(qwen, length=2**20, lengths=Lengths(2**10, 2**20 - 2**10, 8), ranks=8)
    assert not fits(long, "gradients")
    found = remedies(long, "gradients")
    length = int(found.partition("vllm_max_model_length: ")[2].split(",")[0])
    shorter = Lengths(length >> 10, length - (length >> 10), 8)
    assert fits(large.changed(long, length=length, lengths=shorter), "gradients")
    assert not fits(large.changed(long, length=4 * length), "gradients")
    wide = large.run(qwen, tokens=200_000)
    assert not fits(wide, "gradients") and "max_tokens_per_microbatch: 8192" in remedies(wide, "gradients")
    kept = large.run(qwen, checkpointing=False)
    assert not fits(kept, "optimizer") and "gradient_checkpointing: true" in remedies(kept, "optimizer")
    whole = "offload_optimizer: stream (70.93 GiB each way"  # with `none` each rank has all of the state
    assert whole in remedies(large.run(qwen, can_stream=True), "none")
    tiny = large.run(qwen, total=GIB, available=GIB)
    assert remedies(tiny, "fsdp").startswith("no single change")


def test_sequence_parallelism_is_suggested_only_where_possible(qwen: Path) -> None:
    """Suggests at most as many ranks per sequence as a machine has."""
    long = large.run(qwen, length=2**18, lengths=Lengths(2**10, 2**18 - 2**10, 8), ranks=16, can_stream=True)
    assert "sequence_parallel_size" not in remedies(long, "gradients"), "the model or the settings don't let it"
    able = large.changed(long, can_share_rows=True)
    size = int(remedies(able, "gradients").partition("sequence_parallel_size: ")[2].split()[0])
    assert not fits(able, "gradients") and fits(large.changed(able, ranks_per_sequence=size), "gradients")
    assert "sequence_parallel_size" not in remedies(large.changed(able, ranks_per_node=size // 2), "gradients")
    shared = large.changed(able, ranks_per_sequence=2)
    assert "offload_gradients" not in remedies(shared, "gradients")
    offload = pytest.importorskip("colograd.extensions.offload.ways")
    assert not any("gradients" in way.name for way in offload.ways(shared, "gradients"))


GB = 10**9


def test_of_a_lora_the_adapter_alone_is_trained(qwen: Path) -> None:
    """Only the adapter needs gradients and state. The estimate for a missing adapter is close to peft's sizes."""
    remedies = pytest.importorskip("colograd.extensions.remedies.changes")
    shape, sizes = large.sizes(qwen, 16)
    assert sizes.elements == large.PARAMETERS + sizes.trained and sizes.gradients == 4 * sizes.trained
    guessed = remedies.with_adapter(large.sizes(qwen)[1], shape)
    assert sizes.trained == guessed.trained
    for name in ("elements", "trained", "gradients", "optimizer"):
        assert getattr(guessed, name) == pytest.approx(getattr(sizes, name), rel=0.25), name
    for strategy in STRATEGIES[:3]:
        small = large.on_each_rank(strategy, sizes, 8)
        assert small.policy_weights == 0, "the base is the engine's"
        assert small.gradients + small.optimizer + small.exchange < GB


LAYERS, HIDDEN, INNER, HEADS, KEYS, HEAD, VOCABULARY = 3, 64, 160, 4, 2, 16, 100


LLAMA = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS, "head_dim": HEAD, "vocab_size": VOCABULARY,
}  # fmt: skip


def described(config: GRPOConfig, model: Any, length: int, sequences: int, tokens: int, shared: bool) -> RunDescription:
    devices = memory.own_devices(config.device, model)
    return describe_run(config, model, devices, Workload(length, sequences, tokens), shared=shared)


def planned(*args: Any, strategy: str = "none", **sizes: Any) -> MemoryPlan:
    """Memory plan of a run described by these numbers."""
    run = described(*args, **sizes)
    return plan_or_raise(run, auto(run) if strategy == "auto" else strategy)


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).to(dtype)


class Cuda(GRPOConfig):
    """A configuration that believes it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a GPU with 10 GiB: 9 GiB are free, and this process's tensors use 0.5 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB // 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def made(cls: type[GRPOConfig], **changes: Any) -> GRPOConfig:
    config = GRPOConfig(output_dir="unused", report_to="none", **({"optim": "adamw_split"} | changes))
    config.__class__ = cls  # constructed as one, it would look for the GPU
    return config


def test_a_cache_without_room_is_an_error_with_what_would_fit(gpu: None) -> None:
    with pytest.raises(ValueError) as raised:
        planned(made(Cuda), llama(), 30_000_000, 4, 512, True)
    said = str(raised.value).splitlines()
    assert "vllm_max_model_length: " in said[0] and said[1].startswith("memory of a rank: a GPU")

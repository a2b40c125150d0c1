"""The memory plan of a rank: the KV cache gets the remaining memory, the table, a configuration in numbers."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from needs import case, has
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.config import GRPOConfig
from colograd.data import PromptDataset
from colograd.engine.arguments import engine_dtype, engine_kwargs
from colograd.engine.protocol import EngineUse
from colograd.memory import description as memory
from colograd.memory.choice import auto, plan_or_raise
from colograd.memory.description import PLANNED_TOKENS, Devices, RunDescription, Workload, describe_run
from colograd.memory.shape import CacheNeed, Shape
from colograd.memory.table import GIB, PHASES, MemoryPlan
from colograd.policy.loading import outline
from colograd.training.assembly import most_sequences

LAYERS, HIDDEN, INNER, HEADS, KEYS, HEAD, VOCABULARY = 3, 64, 160, 4, 2, 16, 100
LLAMA = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS, "head_dim": HEAD, "vocab_size": VOCABULARY,
}  # fmt: skip


def described_as(**changes: bool) -> Any:
    """The facts of a run that a plan reads."""
    facts = dict.fromkeys(("sleeps", "offloads", "streams", "offloads_gradients"), False) | changes
    return SimpleNamespace(devices=Devices(1, 100 * GIB, 98 * GIB), **facts)


PLAN = MemoryPlan(
    run=described_as(), engine_weights=10 * GIB, policy_weights=0, gradients=20 * GIB, optimizer=30 * GIB,
    activations=15 * GIB, engine=3 * GIB, tokens=4096,
)  # fmt: skip


def described(config: GRPOConfig, model: Any, length: int, sequences: int, tokens: int, shared: bool) -> RunDescription:
    devices = memory.own_devices(config.device, model)
    return describe_run(config, model, devices, Workload(length, sequences, tokens), shared=shared)


def planned(*args: Any, strategy: str = "none", **sizes: Any) -> MemoryPlan:
    """Memory plan of a run described by these numbers."""
    run = described(*args, **sizes)
    return plan_or_raise(run, auto(run) if strategy == "auto" else strategy)


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).to(dtype)


# -- the KV cache


def test_a_generation_needs_its_sequences_and_at_least_one() -> None:
    shape = Shape.of(LlamaConfig(**LLAMA))
    need = CacheNeed.of(shape, 2, length=1000, sequences=64)
    per_token = 2 * LAYERS * KEYS * HEAD * 2  # key and value
    assert need == CacheNeed(per_token, (1000 + 2 * 128) * per_token, 65 * (1000 + 128) * per_token)


def test_cache_gets_the_least_room_of_its_phases() -> None:
    sampling = 98 - 10 - 30 - 3 - 8  # weights, optimizer, the engine's own, margin
    training = 98 - 10 - 20 - 30 - 15 - 8  # gradients and activations besides
    assert PLAN.room == pytest.approx(min(sampling, training) * GIB, rel=1e-9) and training < sampling
    full = dataclasses.replace(PLAN, kv_bytes=PLAN.room)
    assert full.remains("training") == pytest.approx(0, abs=1), "a micro-batch may be trained while it is in use"
    asleep = dataclasses.replace(PLAN, run=described_as(sleeps=True))
    assert asleep.room == pytest.approx(sampling * GIB, rel=1e-9), "it shares the space of gradients and activations"
    both = dataclasses.replace(PLAN, run=described_as(sleeps=True, offloads=True))
    assert both.room == pytest.approx((sampling + 30) * GIB, rel=1e-9)
    assert dataclasses.replace(PLAN, policy_weights=10 * GIB).room == PLAN.room - 10 * GIB
    assert dataclasses.replace(PLAN, kv_bytes=GIB).room == PLAN.room, "of itself it takes nothing away"


def test_the_cache_is_no_larger_than_a_generation_can_use() -> None:
    assert PLAN.with_cache(CacheNeed(1000, GIB, 4 * GIB)).kv_bytes == 4 * GIB
    assert PLAN.with_cache(CacheNeed(1000, GIB, 400 * GIB)).kv_bytes == PLAN.room
    assert PLAN.with_cache(CacheNeed(1000, PLAN.room, 400 * GIB)).kv_bytes == PLAN.room
    for phase in PHASES:
        assert PLAN.with_cache(CacheNeed(1000, GIB, 400 * GIB)).remains(phase) >= 0


def test_a_plan_takes_a_cache_of_one_sequence_only_beside_training() -> None:
    assert PLAN.takes(15 * GIB) and not PLAN.takes(16 * GIB)
    asleep = dataclasses.replace(PLAN, run=described_as(sleeps=True))
    assert asleep.takes(40 * GIB), "while it samples there is more room"
    crowded = dataclasses.replace(asleep, gradients=60 * GIB)
    assert crowded.room == asleep.room and not crowded.takes(GIB), "but training must fit too"
    assert dataclasses.replace(crowded).with_cache(CacheNeed(1, GIB, GIB)).remains("training") < 0


def test_cpu_cache_takes_a_quarter_of_free_memory() -> None:
    """One sequence always has its cache, even if it takes more."""
    assert PLAN.with_cache(CacheNeed(1, GIB, 4 * GIB), on_gpu=False).kv_bytes == 4 * GIB
    assert PLAN.with_cache(CacheNeed(1, GIB, 400 * GIB), on_gpu=False).kv_bytes == 98 * GIB // 4
    assert PLAN.with_cache(CacheNeed(1, 90 * GIB, 400 * GIB), on_gpu=False).kv_bytes == 90 * GIB


# -- the table


def test_the_table_is_aligned_and_adds_up() -> None:
    plan = dataclasses.replace(PLAN, kv_bytes=5 * GIB, kv_tokens=40_960, run=described_as(sleeps=True))
    head, *lines = plan.table().splitlines()
    assert head.split() == ["memory", "of", "a", "rank:", "a", "GPU,", "100.00", "GiB", "sampling", "training"]
    assert len({len(line) for line in (head, *lines)}) == 1, "aligned"
    figures = {line[:-20].strip(): tuple(float(word) for word in line[-20:].split()) for line in lines}
    assert figures == {
        "held by others": (2, 2),
        "weights of the engine": (10, 10),
        "weights of the policy (shared)": (0, 0),
        "gradients": (0, 20),
        "optimizer state": (30, 30),
        "activations, 4,096 tokens (estimated)": (3, 15),
        "KV cache, 40,960 tokens": (5, 0),
        "kept free": (8, 8),
        "remains": (42, 15),
    }
    for column in (0, 1):
        assert sum(pair[column] for pair in figures.values()) == 100
    assert "(measured)" in dataclasses.replace(plan, measured=True).table()


def test_a_plan_that_does_not_fit_says_so() -> None:
    assert "more is planned than there is" in dataclasses.replace(PLAN, activations=40 * GIB).table()
    assert "more is planned" not in PLAN.table()


def test_measured_peak_includes_gradients_and_may_use_margin() -> None:
    plan = dataclasses.replace(PLAN, kv_bytes=15 * GIB)
    assert plan.fits and plan.remains("training") == pytest.approx(0, abs=2)
    measured = plan.with_measured(tokens=8192, peak=40 * GIB)
    assert (measured.activations, measured.tokens, measured.measured) == (20 * GIB, 8192, True)
    assert measured.remains("training") < 0 and measured.fits
    assert not dataclasses.replace(measured, measured=False).fits
    assert not plan.with_measured(tokens=8192, peak=44 * GIB).fits


# -- from a configuration


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


def test_a_gpu_s_plan_counts_this_process_s_tensors_as_free(gpu: None) -> None:
    config, model = made(Cuda, max_tokens_per_microbatch=2048), llama()
    plan = planned(config, model, length=200, sequences=16, tokens=2048, shared=False)
    numel = sum(p.numel() for p in model.parameters())
    devices = plan.run.devices
    assert (devices.total, devices.available, plan.tokens) == (10 * GIB, 19 * GIB // 2, 2048)
    assert (plan.engine_weights, plan.policy_weights, plan.optimizer) == (2 * numel, 2 * numel, 10 * numel)
    assert plan.kv_bytes == 17 * (200 + 128) * 2 * LAYERS * KEYS * HEAD * 2, "16 sequences and one to spare"
    shared = planned(config, model, length=200, sequences=16, tokens=2048, shared=True)
    assert shared.policy_weights == 0


def test_before_it_is_measured_a_budget_is_planned(gpu: None) -> None:
    plan = planned(made(Cuda), llama(), length=200, sequences=16, tokens=0, shared=True)
    assert plan.tokens == PLANNED_TOKENS
    assert planned(made(Cuda), llama(), 50_000, 16, tokens=0, shared=True).tokens == 50_000


def test_vllm_gpu_memory_utilization_overrules_the_plan(gpu: None) -> None:
    config = made(Cuda, vllm_gpu_memory_utilization=0.3)
    plan = planned(config, llama(), 200, 16, 2048, True)
    assert plan.kv_bytes == 0
    kwargs = engine_kwargs("m", config, torch.bfloat16, 200, plan.kv_bytes)
    assert kwargs["gpu_memory_utilization"] == 0.3 and "kv_cache_memory_bytes" not in kwargs
    per_token = 2 * LAYERS * KEYS * HEAD * 2
    assert plan.with_engine(weights=7, apart=0, kv_tokens=320).kv_bytes == 320 * per_token, (
        "known once the engine is built"
    )


def test_planned_cache_bypasses_vllm_free_memory_check() -> None:
    kwargs = engine_kwargs("m", made(Cuda, vllm_enable_sleep_mode=True), torch.bfloat16, 200, 12345)
    assert kwargs["kv_cache_memory_bytes"] == 12345 and kwargs["enable_sleep_mode"]
    assert kwargs["gpu_memory_utilization"] == 0.01
    on_cpu = engine_kwargs("m", made(GRPOConfig, vllm_enable_sleep_mode=True), torch.bfloat16, 200, 12345)
    assert on_cpu["kv_cache_memory_bytes"] == 12345
    assert not {"enable_sleep_mode", "gpu_memory_utilization"} & set(on_cpu)


def test_ranks_seeing_one_gpu_disable_custom_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(Cuda)
    object.__setattr__(config, "vllm_tensor_parallel_size", 2)  # the constructor would require a second rank
    for seen, without in ((1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        assert ("disable_custom_all_reduce" in engine_kwargs("m", config, torch.bfloat16, 200, 12345)) == without


def batches(
    sequences: int, cls: type[GRPOConfig] = Cuda, trained: int = 0, **given: Any
) -> tuple[int | None, list[int] | None]:
    config = made(cls, vllm_engine_kwargs=given)
    kwargs = engine_kwargs("m", config, torch.bfloat16, 200, 12345, EngineUse(sequences=sequences, trained=trained))
    return kwargs.get("max_num_seqs"), kwargs.get("cudagraph_capture_sizes")


def test_vllm_s_batches_and_graphs_are_as_wide_as_a_generation() -> None:
    """vLLM's own defaults on a large GPU: 1,024 sequences, graphs for up to 512."""
    assert batches(12) == (12, [1, 2, 4, 8, 12])
    width, sizes = batches(4096)
    assert width == 1024 and sizes is not None and sizes[-1] == 1024
    assert all(b - a <= 32 for a, b in itertools.pairwise(sizes)) and len(sizes) < 80
    assert batches(0) == (None, None), "unknown: vLLM's own"
    assert batches(12, GRPOConfig) == (None, None), "no graphs on a CPU, where wider batches cost nothing"


def test_an_evaluation_s_width_adds_few_graphs() -> None:
    """Training with 32 sequences, and an evaluation of 1,319 prompts."""
    assert batches(1319, trained=32) == (1024, [1, 2, 4, 8, 16, 24, 32, *range(128, 1025, 128)])
    if not has("drafts"):
        return
    drafted = batches(20, trained=4, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert drafted == (20, [4, 8, 16, 20, 80]), "tokens of a step, four for each sequence"


def test_what_is_said_of_batches_and_graphs_wins() -> None:
    assert batches(64, max_num_seqs=8) == (8, [1, 2, 4, 8])
    assert batches(64, enforce_eager=True) == (64, None)
    assert batches(64, cudagraph_capture_sizes=[5]) == (64, [5])
    for name in ("compilation_config", "max_cudagraph_capture_size"):
        assert batches(64, **{name: {"mode": 3}}) == (64, None)


def test_the_widest_generation_may_be_an_evaluation() -> None:
    config = made(GRPOConfig, num_generations=4, prompts_per_step=6, steps_per_generation=2, num_generations_eval=2)
    train, few, many = (object.__new__(PromptDataset) for _ in range(3))
    few.dataset, many.dataset = [{}] * 3, [{}] * 100  # type: ignore[assignment]
    assert most_sequences(config, [train]) == most_sequences(config, [train, few]) == 48
    assert most_sequences(config, [train, few, many]) == 200


def test_cache_counts_only_sequences_running_at_once(gpu: None) -> None:
    """Sequences beyond vLLM's limit of running ones would never use their cache."""
    run = described(made(Cuda), llama(), 200, 5000, 2048, True)
    assert (run.sequences, run.running) == (5000, 1024)


def test_what_the_user_gives_vllm_is_planned_with(gpu: None) -> None:
    config = made(
        Cuda, vllm_engine_kwargs={"kv_cache_memory_bytes": 999, "dtype": "float32", "max_num_seqs": 4, "x": 1}
    )
    plan = planned(config, llama(), 200, 16, 2048, True)
    assert plan.kv_bytes == 999 and plan.engine_weights == 4 * sum(p.numel() for p in llama().parameters())
    assert engine_dtype(config, torch.bfloat16) is torch.float32
    few = made(Cuda, vllm_engine_kwargs={"max_num_seqs": 4, "kv_cache_dtype": "fp8_e4m3"})
    assert planned(few, llama(), 200, 16, 2048, True).kv_bytes == 5 * (200 + 128) * 2 * LAYERS * KEYS * HEAD


@pytest.mark.parametrize(("ranks", "heads"), [(1, KEYS), (2, KEYS // 2), (8 * KEYS, 1)])
def test_ranks_of_one_engine_share_its_keys_down_to_one_head_each(ranks: int, heads: int) -> None:
    shape = Shape.of(llama().config).split(ranks)
    assert CacheNeed.of(shape, 2, 200, 16).per_token == 2 * LAYERS * heads * HEAD * 2


@pytest.mark.parametrize("settings", [{}, case({"offload_optimizer": True}, "offload")])
def test_on_a_cpu_sleep_and_offload_change_nothing(tmp_path: Any, settings: dict[str, Any]) -> None:
    config = tiny.config(tmp_path, vllm_enable_sleep_mode=True, **settings)
    plan = planned(config, llama(), 64, 8, 4096, False)
    assert not plan.run.sleeps and not plan.run.offloads and plan.run.devices.name.startswith("cpu")
    assert plan.kv_bytes == 9 * (64 + 128) * 2 * LAYERS * KEYS * HEAD * 2
    assert 0 < plan.run.devices.available <= plan.run.devices.total


def test_a_run_is_the_same_before_its_model_is_loaded(tmp_path: Any, gpu: None) -> None:
    config, model = made(Cuda, optim="auto"), llama()
    model.save_pretrained(tmp_path)
    before = described(config, outline(str(tmp_path), torch.bfloat16), 200, 16, 0, True)
    assert before == described(made(Cuda), model, 200, 16, 0, True)
    assert before.sizes.gradients == 4 * before.sizes.trained


# -- sharding, and runs that don't fit


def test_a_plan_knows_its_strategy_of_sharding(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    monkeypatch.setattr(memory, "world_size", lambda: 4)
    model = llama()
    numel = sum(p.numel() for p in model.parameters())
    plan = planned(made(Cuda), model, 200, 16, 2048, True, strategy="gradients")
    assert (plan.gradients, plan.optimizer) == (4 * numel // 4, 10 * numel // 4)
    names = [name for name, *_ in plan.rows()]
    assert {"gradients, 1/4", "optimizer state, 1/4", "gradients on their way"} <= set(names)
    assert plan.table().startswith("memory of a rank, sharding gradients over 4: a GPU, 10.00 GiB")
    assert planned(made(Cuda), model, 200, 16, 2048, True, strategy="auto").strategy == "none", "there is room for all"
    own = planned(made(Cuda), model, 200, 16, 2048, True, strategy="mine.strategies:Mine")
    assert own.optimizer == 10 * numel and "optimizer state" in [name for name, *_ in own.rows()], "as with none"


def test_training_that_does_not_fit_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    """Training must fit by itself, even if the cache sleeps meanwhile and sampling would fit."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    config = made(Cuda, vllm_enable_sleep_mode=True)
    with pytest.raises(ValueError, match=r"(?s)^Training takes \S+ GiB more than the 10.00 GiB of a GPU; .*remains"):
        planned(config, llama(), 100, 4, 400_000, True)


def test_on_a_cpu_it_is_a_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "own_devices", lambda device, model: Devices(1, GIB, GIB, "cpu", on_gpu=False))
    plan = planned(tiny.config(tmp_path), llama(), 64, 8, 10_000_000, False)
    assert not plan.fits
    assert plan.table().splitlines()[-1].startswith("  more is planned than there is: lower max_tokens_per_microbatch")


def test_a_reward_model_s_memory_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 10 GiB: the policy takes 1, a reward model 2, torch's unused blocks 1, another process 1."""
    counters = {"memory_reserved": 4 * GIB, "memory_allocated": 3 * GIB, "get_device_name": "a GPU"}
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 10 * GIB))
    policy: Any = SimpleNamespace(parameters=lambda: [SimpleNamespace(nbytes=GIB, is_cuda=True)])
    assert memory.own_devices(torch.device("cuda"), policy).available == 7 * GIB

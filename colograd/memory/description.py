"""`describe_run`: the numbers of a run that determine each rank's memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from ..config.conflicts import conflict
from ..config.policy import KEEPS_MASTER, resolve_optimizer
from ..config.sharding import TENSOR
from ..engine.arguments import MOST_SEQUENCES, check_parts, engine_dtype, share_is_given
from ..parallel.ranks import gather, world_size
from ..parallel.shards import gradient_dtype
from ..policy.layers import largest_dropout
from ..policy.lora import is_adapted, packed_weights
from ..policy.row_proof import obstacle
from ..policy.supported import check_planned, features, why_rows_stay_whole
from ..runtime import process, registry
from .shape import CacheNeed, Lengths, Shape

WHOLE = ("none", "optimizer", "gradients")  # Sharding strategies with a whole policy on each rank.

ORDER = (*WHOLE, *TENSOR, "fsdp")  # All strategies, the least sharded first.
STRATEGIES = (*WHOLE, "fsdp")
ENGINE_SIZES = (2, 4, 8)  # Numbers of ranks per engine that an error may propose.

# Before a measurement, a plan has micro-batches of at most so many tokens per rank, enough to keep a GPU busy. They are
# longer only if the longest sequence is, or if the user sets their length.
PLANNED_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """Model sizes. ``weights``, ``gradients``, ``optimizer``, ``packed``, item sizes: bytes. Other fields: elements."""

    elements: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    itemsize: int
    gradient_itemsize: int
    largest: int  # Elements of the largest trained parameter.
    block: int  # Elements of the largest decoder layer.
    rest: int  # Elements outside of the decoder's layers, such as embedding and head.
    packed: int = 0
    packed_elements: int = 0
    matrix: int = 0  # Elements of the largest trained parameter in a decoder layer.

    @classmethod
    def of(
        cls, model: torch.nn.Module, optim: str, itemsize: int, to_pack: Mapping[torch.Tensor, int] | None = None
    ) -> PolicySizes:
        """Compute a model's sizes. ``to_pack``: {parameter that loading will quantise: bytes after quantisation}."""
        if to_pack is None:
            found = packed_weights(model)
            packed = {p: found[name].nbytes for name, p in model.named_parameters() if name in found}
            matrices = {p: found[name].shape.numel() for name, p in model.named_parameters() if name in found}
        else:
            packed, matrices = dict(to_pack), {p: p.numel() for p in to_pack}

        def elements(module: torch.nn.Module) -> int:
            return sum(matrices.get(p, p.numel()) for p in module.parameters())

        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        decoder = max(lists, key=elements, default=())
        layers, own = [elements(layer) for layer in decoder], (p for layer in decoder for p in layer.parameters())
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        gradients, whole = gradient_bytes(model, optim), elements(model)
        return cls(
            elements=whole, trained=sum(trained), weights=sum(packed.get(p, p.nbytes) for p in model.parameters()),
            gradients=gradients, optimizer=optimizer_bytes(model, optim), itemsize=itemsize,
            gradient_itemsize=-(-gradients // max(sum(trained), 1)), largest=max(trained, default=0),
            block=max(layers, default=0), rest=whole - sum(layers), packed=sum(packed.values()),
            packed_elements=sum(matrices.values()),
            matrix=max((p.numel() for p in own if p.requires_grad), default=0),
        )  # fmt: skip


def gradient_bytes(model: torch.nn.Module, optim: str = "") -> int:
    trained = (p for p in model.parameters() if p.requires_grad)
    if optim in KEEPS_MASTER:
        return sum(4 * p.numel() for p in trained)
    return sum(p.numel() * gradient_dtype(p).itemsize for p in trained)


def optimizer_bytes(model: torch.nn.Module, optim: str) -> int:
    """Count the bytes of the optimizer's state.

    `adamw_split` has two float32 moments per element. For a bfloat16 element it also has the 16 bits that extend the
    element to a float32 master weight. `muon` counts the same, although matrices need 4 bytes less per element: its
    temporaries take about this difference.
    """
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad and optim in KEEPS_MASTER:
            total += parameter.numel() * (10 if parameter.dtype == torch.bfloat16 else 8)
        elif parameter.requires_grad and optim != "sgd":
            total += parameter.numel() * 2 * (1 if "8bit" in optim else parameter.dtype.itemsize)
    return total


@dataclass(frozen=True, slots=True)
class Devices:
    ranks: int
    total: int
    available: int  # Free bytes of the fullest device before a rank allocates anything.
    name: str = "a GPU"
    on_gpu: bool = True
    ranks_per_node: int = 0  # Number of ranks on a node. 0 means that all ranks are on one node.

    def takes_rows_of(self, ranks: int) -> bool:
        return self.ranks % ranks == 0 and (self.ranks_per_node or self.ranks) % ranks == 0


@dataclass(frozen=True, slots=True)
class Workload:
    length: int  # Tokens of the longest sequence in the engine.
    sequences: int  # Completions of one generation in this rank's engine.
    tokens: int = 0  # Tokens of a micro-batch. 0 means as many as fit.
    prompt: int = 0  # Tokens of the longest prompt. 0 means ``length`` minus the longest completion.
    shares_prompts: bool = True  # Whether a packed row computes a group's prompt once.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription(Workload):
    devices: Devices
    ranks_per_engine: int
    shape: Shape
    sizes: PolicySizes
    engine_itemsize: int
    cache_itemsize: int
    running: int  # Maximum sequences in the engine's KV cache at once.
    lengths: Lengths
    checkpointing: int = 1  # Every n-th layer uses activation checkpointing. 0 means no layer.
    shared: bool = True  # Whether the policy's parameters are the engine's tensors, if the strategy allows sharing.
    served: bool = False  # Whether the engine reads the policy's quantised weights.
    reshard: bool = True  # Whether FSDP frees gathered weights after a forward.
    offloads_parts: bool = False  # Whether FSDP keeps each rank's weights, gradients and optimizer state on the host.
    sleeps: bool = False  # Whether the KV cache is freed during training.
    offloads: bool = False  # Whether the optimizer's state is on the host while the engine samples.
    streams: bool = False  # Whether the optimizer's state stays on the host, and passes through the device in buffers.
    can_stream: bool = False
    offloads_gradients: bool = False  # Whether the sums of gradients are in host memory.
    offloads_activations: bool = False  # Whether inputs of checkpointed layers are in host memory.
    reference: int = 0
    teacher: int = 0
    kv_bytes: int = 0  # Bytes of the KV cache that the user set. 0 means not set.
    overruled: bool = False  # Whether the user sets the engine's fraction of memory, or the KV cache's blocks.
    share: float = 0.0  # The engine's fraction of the device's memory that the user set. 0 means not set.
    strategies: tuple[str, ...] = STRATEGIES
    # Larger number of ranks per engine -> sharding strategies that the run could use then, the least sharded first.
    larger_engines: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    samples: bool = True
    ranks_per_sequence: int = 1  # Ranks that divide a row's tokens (sequence parallelism).
    can_share_rows: bool = False  # Whether model and settings allow sequence parallelism.
    # Further activations (seam "activations"): objects with ``bytes(tokens, lengths, itemsize, checkpointing)``.
    further: tuple[Any, ...] = ()

    @property
    def plans_cache(self) -> bool:
        return self.devices.on_gpu and not (self.overruled or self.kv_bytes)

    @property
    def need(self) -> CacheNeed:
        if not self.samples:
            return CacheNeed(0, 0, 0)
        shape = self.shape.split(self.ranks_per_engine)
        return CacheNeed.of(shape, self.cache_itemsize, self.length, self.running)

    @property
    def longest_rows(self) -> list[int]:
        """Micro-batch lengths (in tokens) to plan with, longest first. Each has room for the longest sequence."""
        if self.tokens:
            return [max(self.tokens, self.length)]
        sizes = [max(PLANNED_TOKENS * self.ranks_per_sequence, self.length)]
        while sizes[-1] > self.length:
            sizes.append(max(self.length, sizes[-1] // 2))
        return sizes

    def without_engine(self) -> RunDescription:
        strategies = tuple(strategy for strategy in self.strategies if strategy not in TENSOR)
        return dataclasses.replace(
            self, samples=False, shared=False, kv_bytes=0, overruled=False, share=0.0, strategies=strategies
        )


def describe_run(
    settings: Any, model: Any, devices: Devices, work: Workload, *, shared: bool, reference: int = 0,
    teacher: int = 0, to_pack: Mapping[torch.Tensor, int] | None = None,
) -> RunDescription:  # fmt: skip
    """Return the `RunDescription` of a run.

    Args:
        settings: a `GRPOConfig`, or the options of `colograd plan`, which have the same field names.
        model: the policy, or a copy on the meta device (`policy.loading.outline`), with its `requires_grad` flags.
        shared: whether the policy's parameters are the engine's tensors.
        reference, teacher: bytes of these models on the device, before sharding.
        to_pack: {parameter that loading will quantise: bytes after quantisation}.
    """
    given: dict[str, Any] = dict(settings.vllm_engine_kwargs or {})
    dtype = model.dtype
    of_engine = engine_dtype(settings, dtype).itemsize
    eight_bit = str(given.get("kv_cache_dtype") or "").startswith("fp8")
    completion = min(settings.max_completion_length or work.length, work.length)
    group = (settings.num_generations or 1) if work.shares_prompts else 1
    optim = resolve_optimizer(settings.optim, dtype)
    excluded = conflict(settings, {"sequence_parallel_size": 2}, "sequence_parallel_size")
    frees_device = {
        "offloads_parts": settings.fsdp_offload_params, "sleeps": settings.vllm_enable_sleep_mode,
        "offloads": settings.offload_optimizer == "sampling", "streams": settings.offload_optimizer == "stream",
        "offloads_gradients": settings.offload_gradients, "offloads_activations": settings.offloads_activations,
    }  # fmt: skip
    can_share_rows = work.shares_prompts and not excluded and not why_rows_stay_whole(model, obstacle(model))
    return RunDescription(
        devices=devices, ranks_per_engine=settings.vllm_tensor_parallel_size, shape=Shape.of(model.config),
        sizes=PolicySizes.of(model, optim, dtype.itemsize, to_pack), engine_itemsize=of_engine,
        cache_itemsize=1 if eight_bit else of_engine, **dataclasses.asdict(work),
        running=min(work.sequences, int(given.get("max_num_seqs") or MOST_SEQUENCES)),
        lengths=Lengths(work.prompt or max(work.length - completion, 1), completion, group),
        checkpointing=settings.checkpointing, shared=shared, served=settings.weights == "shared",
        reshard=settings.fsdp_reshard_after_forward, can_stream=optim == "adamw_split",
        reference=reference, teacher=teacher, kv_bytes=int(given.get("kv_cache_memory_bytes") or 0),
        overruled=share_is_given(settings),
        share=float(settings.vllm_gpu_memory_utilization or given.get("gpu_memory_utilization") or 0.0),
        strategies=_strategies(settings, model, devices, settings.vllm_tensor_parallel_size),
        larger_engines=_larger_engines(settings, model, devices),
        ranks_per_sequence=settings.sequence_parallel_size, can_share_rows=can_share_rows,
        further=tuple(filter(None, (of(model) for of in registry.hooks("activations")))),
        **(frees_device if devices.on_gpu else {}),
    )  # fmt: skip


def _strategies(settings: Any, model: Any, devices: Devices, per_engine: int) -> tuple[str, ...]:
    whole, weights, size = not is_adapted(model), settings.weights, settings.sequence_parallel_size
    possible = {*WHOLE}
    gathers = weights in ("auto", "gathered") and "fsdp" in registry.installed()
    if whole and gathers and size == 1 and not settings.offload_gradients:
        possible.add("fsdp")
    cut = {"sharding": "tensor", "vllm_tensor_parallel_size": per_engine}
    if (
        whole
        and per_engine > 1
        and weights in ("auto", "shared")
        and devices.takes_rows_of(size * per_engine)
        and not conflict(settings, cut, "sharding")
        and not largest_dropout(model)
        and any(feature.can_be_cut(model.config) for feature in features())
        and engine_dtype(settings, model.dtype) == model.dtype
        and getattr(settings, "vllm_model_impl", "auto") != "transformers"
    ):
        possible.update(TENSOR)
    return tuple(strategy for strategy in ORDER if strategy in possible)


def _larger_engines(settings: Any, model: Any, devices: Devices) -> dict[int, tuple[str, ...]]:
    """Return {ranks per engine: sharding strategies that are then possible} for engines larger than the run's."""
    drafts = "speculative_config" in dict(settings.vllm_engine_kwargs or {})
    if is_adapted(model) or settings.weights != "auto" or drafts:
        return {}
    found = {}
    for ranks in ENGINE_SIZES:
        if ranks > settings.vllm_tensor_parallel_size:
            # The checks raise for a model that can't be split over so many ranks, or lacks sizes.
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                check_parts(model.config, ranks, ranks)
                check_planned(model.config, ranks)
                enough = dataclasses.replace(devices, ranks=ranks * settings.sequence_parallel_size, ranks_per_node=0)
                found[ranks] = _strategies(settings, model, enough, ranks)
    return found


def own_devices(device: torch.device, model: torch.nn.Module) -> Devices:
    """Describe all ranks' devices. Memory of ``model`` counts as free: a memory plan adds the model. A collective."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        loaded = sum(p.nbytes for p in model.parameters() if p.is_cuda)
        name, available = torch.cuda.get_device_name(device), free + unused + loaded
    else:
        memory, sharing = psutil.virtual_memory(), process.local_world_size()
        loaded = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        name = "cpu" if sharing == 1 else f"cpu, shared by {sharing} ranks"
        total = memory.total // sharing
        available = min(memory.total, memory.available + loaded * sharing) // sharing
    return Devices(world_size(), total, min(gather(available)), name, on_gpu, process.local_world_size())

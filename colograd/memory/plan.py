"""The memory plan of a rank: what its device holds while it samples and while it trains, and how large the KV cache is.

Everything but the KV cache follows from the model and the configuration; the cache gets what is left, up to what one
generation can use. Sampling and training alternate, so each part is counted in the phases in which it exists:

    part              sampling                                  training
    weights           engine's, and the policy's if copied      the same
    gradients         none: freed after the optimizer step      4 or 2 bytes per parameter
    optimizer state   there, unless `offload_optimizer`         there
    reference model   there, unless `offload_reference`         there, or in the gradients' place before there are any
    activations       the engine's own                          of one micro-batch
    KV cache          there                                     there, unless `vllm_enable_sleep_mode`

A cache that sleeps while the policy trains thus shares its space with gradients and activations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ..config import GRPOConfig
from ..engine.arguments import engine_dtype, share_is_given
from ..parallel.ranks import gather
from ..policy.logprobs import TILE_ELEMENTS
from ..runtime import process

MARGIN = 0.08  # of the device, for CUDA graphs, NCCL and fragmentation; vLLM's own default leaves as much
PLANNED_TOKENS = 16384  # of a micro-batch on a GPU until it is measured: enough to keep any GPU busy
CPU_SHARE = 4  # on a CPU the KV cache takes at most this part of the free memory
BLOCK = 128  # tokens of a KV block in vLLM, at most: less in most attention backends
# vLLM's defaults for `LLM` on large GPUs: tokens of one engine step, and sequences decoded at once.
ENGINE_TOKENS, ENGINE_SEQUENCES = 16384, 1024
PHASES = ("sampling", "training")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, in elements."""

    layers: int
    hidden: int
    intermediate: int  # of the MLPs that one token goes through
    queries: int  # heads * head size
    keys: int  # key-value heads * head size
    vocabulary: int

    @classmethod
    def of(cls, model_config: Any, ranks: int = 1) -> Shape:
        """From a transformers configuration; what it doesn't name is guessed as GPT-2 has it.

        Args:
            ranks: that share the keys and values. Each has one head at least.
        """
        config = model_config.get_text_config()

        def size(name: str, default: int) -> int:
            value = getattr(config, name, None) or default
            return int(max(value) if isinstance(value, list | tuple) else value)  # some have one per layer

        hidden, heads = size("hidden_size", 0), size("num_attention_heads", 1)
        head, inner = size("head_dim", hidden // heads), size("intermediate_size", 4 * hidden)
        if experts := size("num_experts_per_tok", 0):
            inner = experts * size("moe_intermediate_size", inner)
        return cls(
            layers=size("num_hidden_layers", 0),
            hidden=hidden,
            intermediate=inner,
            queries=heads * head,
            keys=max(size("num_key_value_heads", heads) // ranks, 1) * head,
            vocabulary=size("vocab_size", 0),
        )


def layer_bytes(shape: Shape, itemsize: int) -> int:
    """Bytes that one decoder layer keeps for the backward pass, per token.

    Counted on transformers' Llama layer, as arXiv 2205.05198 (section 4.1) counts a GPT layer, without the attention
    matrix, which fused attention never stores. Each of two RMSNorms: its float32 input, the normalised and the scaled
    output. Attention: queries, keys and values (keys and values once more where they are joined with their prompt's),
    its output and the copy that the projection reads. MLP: gate, activated gate, up, product.
    """
    norms = 2 * shape.hidden * (4 + 2 * itemsize)
    return norms + itemsize * (3 * shape.queries + 4 * shape.keys + 4 * shape.intermediate)


def activation_bytes(shape: Shape, tokens: int, itemsize: int, checkpointing: bool, device: str) -> int:
    """An estimate of the peak of one forward and backward beside weights and gradients.

    Without checkpointing every layer's `layer_bytes`; with it every layer's input and one layer's `layer_bytes`. To
    both come the gradients inside one layer, the final norm, the head's input and its gradient, the tiles of logits
    (two of float32, see `logprobs`), and the gradient of the head's weight before it is added to the one there is.
    SmolLM2-135M in bfloat16 on a CPU: 964 and 1,757 MiB for 1,024 and 2,048 tokens where 953 and 1,697 were measured,
    with checkpointing 248 for 1,024 where it were 272.
    """
    layer = layer_bytes(shape, itemsize)
    kept = shape.layers * shape.hidden * itemsize + layer if checkpointing else shape.layers * layer
    inside = itemsize * 2 * (shape.intermediate + shape.hidden)
    head = shape.hidden * (8 + 3 * itemsize)
    tiles = 2 * 4 * TILE_ELEMENTS.get(device, 2**24)
    return tokens * (kept + inside + head) + tiles + 4 * shape.vocabulary * shape.hidden


def engine_bytes(shape: Shape, sequences: int, itemsize: int) -> int:
    """An estimate of what the engine needs beside weights and KV cache: one step's activations, which aren't kept from
    layer to layer, and three float32 tensors of logits while it samples."""
    step = ENGINE_TOKENS * itemsize * (4 * shape.hidden + 2 * shape.intermediate)
    return step + 3 * 4 * min(sequences, ENGINE_SEQUENCES) * shape.vocabulary


def gradient_bytes(model: torch.nn.Module) -> int:
    """Of the trained parameters, in the dtype in which their gradients accumulate."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(p.numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize for p in trained)


def optimizer_bytes(model: torch.nn.Module, name: str) -> int:
    """State of the optimizer after its first step; for optimizers that aren't AdamW, which keep less, a bound.

    `adamw_split` keeps 10 bytes per bfloat16 parameter (two float32 moments, 16 bits of remainder) and 8 per float32
    one; torch's AdamW keeps two moments in the parameter's dtype; those named 8bit one byte each.
    """
    if name == "sgd":
        return 0
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw_split":
        return sum((10 if p.dtype == torch.bfloat16 else 8) * p.numel() for p in trained)
    return sum(2 * (1 if "8bit" in name else p.itemsize) * p.numel() for p in trained)


# -- the KV cache


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """What a generation asks of the KV cache, in bytes."""

    per_token: int
    least: int  # one sequence at full length
    wanted: int  # every sequence of a generation at full length: more would never be used

    @classmethod
    def of(cls, shape: Shape, itemsize: int, length: int, sequences: int) -> CacheNeed:
        """Of ``sequences`` sequences of up to ``length`` tokens.

        One token takes a key and a value per layer: 2 * layers * key heads * head size * itemsize. (An upper bound
        where a layer keeps a window only.)
        """
        per_token = 2 * shape.layers * shape.keys * itemsize
        # vLLM keeps a block for itself, and a sequence's last block is partly empty.
        return cls(per_token, (length + 2 * BLOCK) * per_token, (sequences + 1) * (length + BLOCK) * per_token)


# -- the plan


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank's device holds, in bytes."""

    device: str
    total: int
    available: int  # to this process: the total less what others hold
    engine_weights: int
    policy_weights: int  # 0: shared with the engine
    gradients: int
    optimizer: int
    activations: int  # of a micro-batch of ``tokens`` tokens
    engine: int  # what the engine needs beside weights and KV cache
    tokens: int
    measured: bool = False  # the activations; else they are estimated
    kv_per_token: int = 0
    kv_bytes: int = 0  # 0: not settled, as the engine takes a share of the device
    kv_tokens: int = 0
    sleeps: bool = False  # the KV cache while the policy trains
    offloads: bool = False  # the optimizer's state while the engine samples
    reference: int = 0  # 0: there is none, or it waits on the host

    @property
    def margin(self) -> int:
        """Kept free."""
        return int(MARGIN * self.total)

    def rows(self) -> list[tuple[str, int, int]]:
        """(what, bytes while sampling, bytes while training) of each part."""
        shared = "" if self.policy_weights else " (shared)"
        activations = f"activations, {self.tokens:,} tokens ({'measured' if self.measured else 'estimated'})"
        return [
            ("held by others", self.total - self.available, self.total - self.available),
            ("weights of the engine", self.engine_weights, self.engine_weights),
            (f"weights of the policy{shared}", self.policy_weights, self.policy_weights),
            *([("weights of the reference", self.reference, self.reference)] if self.reference else []),
            ("gradients", 0, self.gradients),
            ("optimizer state", 0 if self.offloads else self.optimizer, self.optimizer),
            (activations, self.engine, self.activations),
            (f"KV cache, {self.kv_tokens:,} tokens", self.kv_bytes, 0 if self.sleeps else self.kv_bytes),
            ("kept free", self.margin, self.margin),
        ]

    def remains(self, phase: str) -> int:
        """What is left while ``phase`` of `PHASES`; negative: more is planned than there is."""
        column = 1 + PHASES.index(phase)
        return self.total - sum(int(row[column]) for row in self.rows())

    @property
    def room(self) -> int:
        """Bytes that the KV cache may take: what is left in every phase in which it exists."""
        empty = dataclasses.replace(self, kv_bytes=0)
        sampling = empty.remains("sampling")
        return sampling if self.sleeps else min(sampling, empty.remains("training"))

    def with_cache(self, need: CacheNeed) -> MemoryPlan:
        """The plan with a KV cache of what one generation can use, as far as there is room.

        Raises:
            ValueError: not even one sequence at full length fits.
        """
        if self.room < need.least:
            parts = [(name, max(sampling, training)) for name, sampling, training in self.rows()]
            beside = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size >= GIB // 200)
            raise ValueError(
                f"The KV cache of one full sequence takes {_gib(need.least)} GiB, but {_gib(max(self.room, 0))} of "
                f"{_gib(self.total)} GiB are left beside {beside}: at least one must fit. Lower "
                f"vllm_max_model_length or max_tokens_per_microbatch{self._switches()}, or set "
                "vllm_gpu_memory_utilization to overrule the plan."
            )
        return dataclasses.replace(self, kv_bytes=min(need.wanted, self.room))

    def with_cpu_cache(self, need: CacheNeed) -> MemoryPlan:
        """The same on a CPU, whose memory others use too: a quarter of what is free, but one full sequence always."""
        return dataclasses.replace(self, kv_bytes=max(need.least, min(need.wanted, self.available // CPU_SHARE)))

    def with_engine(self, weights: int, apart: int, kv_tokens: int) -> MemoryPlan:
        """The plan with what the engine, once built, holds, and the policy ``apart`` from it."""
        kv_bytes = self.kv_bytes or kv_tokens * self.kv_per_token
        return dataclasses.replace(
            self, engine_weights=weights, policy_weights=apart, kv_bytes=kv_bytes, kv_tokens=kv_tokens
        )

    def _switches(self) -> str:
        off = [
            ("vllm_enable_sleep_mode", self.sleeps),
            ("offload_optimizer", self.offloads),
            ("offload_reference", not self.reference),
        ]
        return "".join(f", set {name}: true" for name, on in off if not on)

    def with_measured(self, tokens: int, peak: int) -> MemoryPlan:
        """The plan with a measured budget: ``peak`` bytes of forward and backward, gradients included."""
        return dataclasses.replace(self, tokens=tokens, activations=max(peak - self.gradients, 0), measured=True)

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it. What is measured may go into the part that is kept free."""
        slack = self.margin if self.measured else 0
        return min(self.remains(phase) for phase in PHASES) + slack >= 0

    def table(self) -> str:
        """The plan as aligned lines, in GiB."""
        rows = [*self.rows(), ("remains", self.remains("sampling"), self.remains("training"))]
        head = f"memory of a rank: {self.device}, {_gib(self.total)} GiB"
        width = max(len(head), *(len(name) + 2 for name, _, _ in rows))
        lines = [f"{head:<{width}} {PHASES[0]:>9} {PHASES[1]:>9}"]
        lines += [f"{f'  {name}':<{width}} {_gib(a):>9} {_gib(b):>9}" for name, a, b in rows]
        if not self.fits:
            lines.append(
                "  more is planned than there is: lower max_tokens_per_microbatch or vllm_max_model_length, or keep "
                "gradient_checkpointing: true"
            )
        return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


# -- reading the device


def device_memory(device: torch.device, loaded: int) -> tuple[str, int, int]:
    """Name, total bytes, and bytes available to this rank if it held no tensor yet.

    Args:
        loaded: bytes of this rank's tensors in system memory, for a rank on a CPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.get_device_name(device), total, free + torch.cuda.memory_reserved(device)
    memory, ranks = psutil.virtual_memory(), process.local_world_size()
    of_ranks = "cpu" if ranks == 1 else f"cpu, shared by {ranks} ranks"
    return of_ranks, memory.total // ranks, min(memory.total, memory.available + loaded * ranks) // ranks


def plan(
    config: GRPOConfig, model: Any, length: int, sequences: int, tokens: int, shared: bool, reference: int = 0
) -> MemoryPlan:
    """The plan of this rank, the same on every rank: a collective.

    Args:
        model: the policy, on any device, with frozen parameters marked as such.
        length: tokens of the longest sequence that the engine takes.
        sequences: completions of one generation of this rank's engine.
        tokens: the budget of a micro-batch; 0: still to be measured.
        shared: whether the policy's parameters are views of the engine's tensors.
        reference: bytes that the reference of the KL term will hold.

    Raises:
        ValueError: on a GPU, no room for the KV cache of one sequence.
    """
    given: dict[str, Any] = dict(config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
    shape, device, ranks = Shape.of(model.config), config.device.type, config.layout.ranks_per_engine
    weights = sum(p.numel() for p in model.parameters())
    in_policy = sum(p.nbytes for p in model.parameters())
    name, total, available = device_memory(config.device, in_policy)
    sequences = min(sequences, int(given.get("max_num_seqs") or sequences))
    of_policy, of_engine = model.dtype.itemsize, engine_dtype(config, model.dtype).itemsize
    planned = tokens or max(PLANNED_TOKENS, length)
    eight_bit = str(given.get("kv_cache_dtype") or "").startswith("fp8")
    need = CacheNeed.of(Shape.of(model.config, ranks), 1 if eight_bit else of_engine, length, sequences)
    found = MemoryPlan(
        device=name,
        total=total,
        available=min(gather(available)),
        engine_weights=weights * of_engine // ranks,
        policy_weights=0 if shared else in_policy,
        gradients=gradient_bytes(model),
        optimizer=optimizer_bytes(model, config.optim),
        activations=activation_bytes(shape, planned, of_policy, config.gradient_checkpointing, device),
        engine=engine_bytes(shape, sequences, of_engine) if device == "cuda" else 0,
        tokens=planned,
        sleeps=config.vllm_enable_sleep_mode and device == "cuda",
        offloads=config.offload_optimizer and device == "cuda",
        reference=reference,
        kv_per_token=need.per_token,
        kv_bytes=int(given.get("kv_cache_memory_bytes") or 0),
    )
    if found.kv_bytes or (device == "cuda" and share_is_given(config)):
        return found
    return found.with_cpu_cache(need) if device == "cpu" else found.with_cache(need)

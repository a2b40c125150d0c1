"""`MemoryPlan`: the memory of one rank's device while it samples and while it trains, as a table.

Sampling and training alternate, so each part counts only while it is allocated:

    part              sampling                                  training
    weights           engine's, and the policy's if not shared  the same
    gradients         none: freed after the optimizer step      4 or 2 bytes per parameter, less where sharded; with
                                                                `offload_gradients` those on their way
    optimizer state   yes, unless `offload_optimizer`           yes; with `stream` two buffers of it
    exchange          none                                      buckets on their way, or gathered blocks
    reference model   yes, unless `offload_reference`           yes, or in the place of gradients that don't exist yet
    teacher           yes, unless `offload_teacher`             as the reference model
    activations       the engine's                              one micro-batch's
    KV cache          yes                                       yes, unless `vllm_enable_sleep_mode`

A KV cache that sleeps while the policy trains shares its space with gradients and activations. A KV cache that stays is
planned in addition to them, so a micro-batch may be trained between two steps of the engine (`overlap`): at the end of
sampling a step takes far less than a micro-batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .shape import CacheNeed

MARGIN = 0.08  # share of the device, for CUDA graphs, NCCL and fragmentation; vLLM's own default leaves as much
CPU_SHARE = 4  # on a CPU the KV cache takes at most this part of the free memory
PHASES = ("sampling", "training")
GIB = 2**30
# Parts that the table omits if they round to 0.00.
OPTIONAL = ("weights of the reference", "weights of the teacher", "gathered weights", "gradients on their way")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The parts of one rank's memory, in bytes."""

    device: str
    total: int
    available: int  # bytes for this process: the total less other processes' memory
    engine_weights: int  # 0: there is no engine
    policy_weights: int  # 0: shared with the engine
    gradients: int
    optimizer: int
    activations: int  # bytes for a micro-batch of ``tokens`` tokens
    engine: int  # bytes of the engine without weights and KV cache
    tokens: int
    measured: bool = False  # activations are measured; False: estimated
    kv_per_token: int = 0
    kv_bytes: int = 0  # 0: unknown until the engine is built with its share of the device
    kv_tokens: int = 0
    sleeps: bool = False  # the KV cache sleeps while the policy trains
    offloads: bool = False  # the optimizer's state is on the host while the engine samples
    streams: bool = False  # the optimizer's state is always on the host: its buffers on the device count
    reference: int = 0  # bytes; 0: there is no reference model, or it waits on the host
    teacher: int = 0  # bytes; 0: there is no teacher, or it waits on the host
    strategy: str = "none"  # the sharding strategy
    ranks: int = 1
    exchange: int = 0  # gradients on their way to other ranks, or weights gathered from them
    offloads_gradients: bool = False  # gradients go to the host: only gradients on their way count
    remedies: str = ""  # changes that would make the run fit; empty: it fits, or none was tried

    @property
    def margin(self) -> int:
        """Bytes kept free."""
        return int(MARGIN * self.total)

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (name, bytes while sampling, bytes while training) of each part."""
        part = f", 1/{self.ranks}"
        of_policy = part if self.strategy == "fsdp" else "" if self.policy_weights else " (shared)"
        of_gradients = part if self.strategy in ("gradients", "fsdp") else ""
        of_gradients += ", on their way to the host" if self.offloads_gradients else ""
        of_state = ("" if self.strategy == "none" else part) + (", on its way through" if self.streams else "")
        exchange = "gathered weights" if self.strategy == "fsdp" else "gradients on their way"
        activations = f"activations, {self.tokens:,} tokens ({'measured' if self.measured else 'estimated'})"
        rows = [
            ("held by others", self.total - self.available, self.total - self.available),
            ("weights of the engine", self.engine_weights, self.engine_weights),
            (f"weights of the policy{of_policy}", self.policy_weights, self.policy_weights),
            ("weights of the reference", self.reference, self.reference),
            ("weights of the teacher", self.teacher, self.teacher),
            (f"gradients{of_gradients}", 0, self.gradients),
            (exchange, 0, self.exchange),
            (f"optimizer state{of_state}", 0 if self.offloads else self.optimizer, self.optimizer),
            (activations, self.engine, self.activations),
            (f"KV cache, {self.kv_tokens:,} tokens", self.kv_bytes, 0 if self.sleeps else self.kv_bytes),
            ("kept free", self.margin, self.margin),
        ]
        if not self.engine_weights:
            rows = [row for row in rows if row[0] != "weights of the engine" and not row[0].startswith("KV cache")]
        return [row for row in rows if row[0] not in OPTIONAL or row[2]]

    def remains(self, phase: str) -> int:
        """Return the bytes left in ``phase`` of `PHASES`; negative: the plan exceeds the device."""
        column = 1 + PHASES.index(phase)
        return self.total - sum(int(row[column]) for row in self.rows())

    @property
    def room(self) -> int:
        """Bytes that the KV cache may take: the least remainder of the phases in its lifetime."""
        empty = dataclasses.replace(self, kv_bytes=0)
        sampling = empty.remains("sampling")
        return sampling if self.sleeps else min(sampling, empty.remains("training"))

    @property
    def known(self) -> int:
        """Bytes of weights, gradients, optimizer and KV cache in the fuller phase: no estimates."""
        weights = self.engine_weights + self.policy_weights + self.reference + self.teacher
        sampling = self.kv_bytes + (0 if self.offloads else self.optimizer)
        training = self.gradients + self.optimizer + (0 if self.sleeps else self.kv_bytes)
        return weights + max(sampling, training)

    def takes(self, need: CacheNeed) -> bool:
        """Return whether training fits together with a KV cache of one full sequence."""
        empty = dataclasses.replace(self, kv_bytes=0)
        return self.room >= need.least and empty.remains("training") >= 0

    def with_cache(self, need: CacheNeed) -> MemoryPlan:
        """Add a KV cache for one whole generation, or as large as fits."""
        return dataclasses.replace(self, kv_bytes=min(need.wanted, max(self.room, 0)))

    def with_cpu_cache(self, need: CacheNeed) -> MemoryPlan:
        """Add a KV cache on a CPU: at most a quarter of the free memory, but at least one full sequence."""
        return dataclasses.replace(self, kv_bytes=max(need.least, min(need.wanted, self.available // CPU_SHARE)))

    def with_engine(self, weights: int, apart: int, kv_tokens: int) -> MemoryPlan:
        """Set the bytes of the built engine, and of the policy's weights ``apart`` from it."""
        kv_bytes = self.kv_bytes or kv_tokens * self.kv_per_token
        return dataclasses.replace(
            self, engine_weights=weights, policy_weights=apart, kv_bytes=kv_bytes, kv_tokens=kv_tokens
        )

    def with_measured(self, tokens: int, peak: int) -> MemoryPlan:
        """Set a measured budget: ``peak`` is the bytes of forward and backward, gradients included."""
        activations = max(peak - self.gradients - self.exchange, 0)
        return dataclasses.replace(self, tokens=tokens, activations=activations, measured=True)

    @property
    def fits(self) -> bool:
        """Whether all parts fit. Measured activations may use the margin."""
        slack = self.margin if self.measured else 0
        return min(self.remains(phase) for phase in PHASES) + slack >= 0

    def lines(self) -> list[str]:
        """Format the plan as aligned lines, in GiB."""
        shown = [row for row in self.rows() if row[0] not in OPTIONAL or row[2] >= GIB // 200]
        rows = [*shown, ("remains", self.remains("sampling"), self.remains("training"))]
        of_ranks = "" if self.strategy == "none" else f", sharding {self.strategy} over {self.ranks}"
        head = f"memory of a rank{of_ranks}: {self.device}, {gib(self.total)} GiB"
        width = max(len(head), *(len(name) + 2 for name, _, _ in rows))
        lines = [f"{head:<{width}} {PHASES[0]:>9} {PHASES[1]:>9}"]
        return lines + [f"{f'  {name}':<{width}} {gib(a):>9} {gib(b):>9}" for name, a, b in rows]

    def table(self) -> str:
        """Join the lines into one text; the last one names remedies if the plan doesn't fit."""
        last = [] if self.fits else [f"  more is planned than there is: {self.remedies or REMEDIES}"]
        return "\n".join([*self.lines(), *last])


# For a plan that fit until the engine was built or the activations were measured: no change was tried.
REMEDIES = "lower max_tokens_per_microbatch or vllm_max_model_length, or set gradient_checkpointing: true"


def gib(size: float) -> str:
    """Format bytes as GiB, with two digits."""
    return f"{size / GIB:.2f}"

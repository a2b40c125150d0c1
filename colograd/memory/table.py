"""`MemoryPlan`: the memory of one rank's device while it samples and while it trains, as a table.
Offloaded weights of reference and teacher models aren't counted: they leave the device before gradients exist."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .description import RunDescription
from .shape import CacheNeed

# Fraction of the device that a plan leaves free for CUDA graphs, NCCL and fragmentation. vLLM's default leaves as much.
MARGIN = 0.08

CPU_SHARE = 4  # On a CPU the KV cache takes at most a quarter of free memory, unless one sequence needs more.
PHASES = ("sampling", "training")
GIB = 2**30
# Advice if a plan doesn't fit any more because the built engine, or measured activations, need more than estimated.
REMEDIES = "lower max_tokens_per_microbatch or vllm_max_model_length, or set gradient_checkpointing: true"


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of weights, gradients, optimizer state and buffers on one rank's device."""

    engine_weights: int  # The engine's weights: 0 if the run has no engine.
    policy_weights: int  # The policy's weights: 0 if they are the engine's tensors, or in host memory.
    gradients: int  # Gradients exist from a step's first backward to its optimizer step.
    optimizer: int
    exchange: int = 0  # Gradients sent to other ranks, or weights gathered from other ranks.
    on_way: int = 0  # Maximum part of ``gradients`` in transfer to the host.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(RankBytes):
    run: RunDescription
    activations: int
    engine: int  # Bytes of the engine without weights and KV cache.
    tokens: int
    measured: bool = False
    kv_bytes: int = 0  # Bytes of the KV cache. 0 means unknown until the engine is built.
    kv_tokens: int = 0
    reference: int = 0
    teacher: int = 0
    strategy: str = "none"
    remedies: str = ""

    @property
    def margin(self) -> int:
        return int(MARGIN * self.run.devices.total)

    def rows(self) -> list[tuple[str, int, int]]:
        """Return the rows of the table: (name of the part, bytes while sampling, bytes while training)."""
        run, devices = self.run, self.run.devices
        part = f", 1/{devices.ranks}"
        of_policy = part if self.strategy == "fsdp" else "" if self.policy_weights else " (shared)"
        shared_out = self.strategy.rpartition("+")[2]  # E.g. "gradients" in `tensor+gradients`.
        of_gradients = part if shared_out in ("gradients", "fsdp") else ""
        of_gradients += ", on their way to the host" if run.offloads_gradients else ""
        of_state = part if shared_out in ("optimizer", "gradients", "fsdp") else ""
        of_state += ", on its way through" if run.streams else ""
        exchange = "gathered weights" if self.strategy == "fsdp" else "gradients on their way"
        activations = f"activations, {self.tokens:,} tokens ({'measured' if self.measured else 'estimated'})"
        held = devices.total - devices.available  # Memory of other processes.
        weights = {
            "engine": self.engine_weights, f"policy{of_policy}": self.policy_weights, "reference": self.reference,
            "teacher": self.teacher,
        }  # fmt: skip
        cache = (f"KV cache, {self.kv_tokens:,} tokens", self.kv_bytes, 0 if run.sleeps else self.kv_bytes)
        return [
            ("held by others", held, held),
            *((f"weights of the {name}", size, size) for name, size in weights.items() if size or "policy" in name),
            (f"gradients{of_gradients}", 0, self.gradients),
            *([(exchange, 0, self.exchange)] if self.exchange else []),
            (f"optimizer state{of_state}", 0 if run.offloads or run.streams else self.optimizer, self.optimizer),
            (activations, self.engine, self.activations),
            *([cache] if self.engine_weights else []),
            ("kept free", self.margin, self.margin),
        ]

    def remains(self, phase: str) -> int:
        column = 1 + PHASES.index(phase)
        return self.run.devices.total - sum(int(row[column]) for row in self.rows())

    @property
    def room(self) -> int:
        empty = dataclasses.replace(self, kv_bytes=0)
        sampling = empty.remains("sampling")
        return sampling if self.run.sleeps else min(sampling, empty.remains("training"))

    def takes(self, cache: int) -> bool:
        empty = dataclasses.replace(self, kv_bytes=0)
        return self.room >= cache and empty.remains("training") >= 0

    def with_cache(self, need: CacheNeed, on_gpu: bool = True) -> MemoryPlan:
        least, most = (0, max(self.room, 0)) if on_gpu else (need.least, self.run.devices.available // CPU_SHARE)
        return dataclasses.replace(self, kv_bytes=max(least, min(need.wanted, most)))

    def with_engine(self, weights: int, apart: int, kv_tokens: int) -> MemoryPlan:
        """Return the plan with the built engine's bytes. ``apart``: bytes of policy weights outside the engine."""
        kv_bytes = self.kv_bytes or kv_tokens * self.run.need.per_token
        return dataclasses.replace(
            self, engine_weights=weights, policy_weights=apart, kv_bytes=kv_bytes, kv_tokens=kv_tokens
        )

    def with_measured(self, tokens: int, peak: int) -> MemoryPlan:
        """Return the plan with measured activations.

        ``peak``: bytes of a forward and backward. The plan's `gradients` and `exchange` are subtracted from ``peak``.
        """
        activations = max(peak - self.gradients - self.exchange, 0)
        return dataclasses.replace(self, tokens=tokens, activations=activations, measured=True)

    @property
    def fits(self) -> bool:
        slack = self.margin if self.measured else 0  # Measured activations may use the margin.
        return min(self.remains(phase) for phase in PHASES) + slack >= 0

    def lines(self) -> list[str]:
        rows = [*self.rows(), ("remains", self.remains("sampling"), self.remains("training"))]
        devices = self.run.devices
        of_ranks = "" if self.strategy == "none" else f", sharding {self.strategy} over {devices.ranks}"
        head = f"memory of a rank{of_ranks}: {devices.name}, {gib(devices.total)} GiB"
        width = max(len(head), *(len(name) + 2 for name, _, _ in rows))
        lines = [f"{head:<{width}} {PHASES[0]:>9} {PHASES[1]:>9}"]
        return lines + [f"{f'  {name}':<{width}} {gib(a):>9} {gib(b):>9}" for name, a, b in rows]

    def table(self) -> str:
        last = [] if self.fits else [f"  more is planned than there is: {self.remedies or REMEDIES}"]
        return "\n".join([*self.lines(), *last])


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"

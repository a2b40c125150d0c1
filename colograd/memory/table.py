"""`MemoryPlan`: what a rank's device holds while it samples and while it trains, as a table.

Sampling and training alternate, so each part is counted in the phases in which it exists:

    part              sampling                                  training
    weights           engine's, and the policy's if not shared  the same
    gradients         none: freed after the optimizer step      4 or 2 bytes per parameter, less where shared out
    optimizer state   there, unless `offload_optimizer`         there
    exchange          none                                      buckets on their way, or gathered blocks
    reference model   there, unless `offload_reference`         there, or in the gradients' place before there are any
    activations       the engine's own                          of one micro-batch
    KV cache          there                                     there, unless `vllm_enable_sleep_mode`

A cache that sleeps while the policy trains thus shares its space with gradients and activations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .shape import CacheNeed

MARGIN = 0.08  # of the device, for CUDA graphs, NCCL and fragmentation; vLLM's own default leaves as much
CPU_SHARE = 4  # on a CPU the KV cache takes at most this part of the free memory
PHASES = ("sampling", "training")
GIB = 2**30
# Parts that not every run has: a table leaves out those that it would say 0.00 of.
OPTIONAL = ("weights of the reference", "gathered weights", "gradients on their way")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank's device holds, in bytes."""

    device: str
    total: int
    available: int  # to this process: the total less what others hold
    engine_weights: int  # 0: there is no engine
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
    way: str = "none"  # of sharding
    ranks: int = 1  # that share
    exchange: int = 0  # gradients on their way to other ranks, or weights gathered from them
    remedies: str = ""  # what would fit, where this doesn't

    @property
    def margin(self) -> int:
        """Kept free."""
        return int(MARGIN * self.total)

    def rows(self) -> list[tuple[str, int, int]]:
        """(what, bytes while sampling, bytes while training) of each part."""
        part = f", 1/{self.ranks}"
        of_policy = part if self.way == "fsdp" else "" if self.policy_weights else " (shared)"
        of_gradients = part if self.way in ("gradients", "fsdp") else ""
        of_state = "" if self.way == "none" else part
        exchange = "gathered weights" if self.way == "fsdp" else "gradients on their way"
        activations = f"activations, {self.tokens:,} tokens ({'measured' if self.measured else 'estimated'})"
        rows = [
            ("held by others", self.total - self.available, self.total - self.available),
            ("weights of the engine", self.engine_weights, self.engine_weights),
            (f"weights of the policy{of_policy}", self.policy_weights, self.policy_weights),
            ("weights of the reference", self.reference, self.reference),
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
        """What is left while ``phase`` of `PHASES`; negative: more is planned than there is."""
        column = 1 + PHASES.index(phase)
        return self.total - sum(int(row[column]) for row in self.rows())

    @property
    def room(self) -> int:
        """Bytes that the KV cache may take: what is left in every phase in which it exists."""
        empty = dataclasses.replace(self, kv_bytes=0)
        sampling = empty.remains("sampling")
        return sampling if self.sleeps else min(sampling, empty.remains("training"))

    @property
    def known(self) -> int:
        """Bytes of weights, gradients, optimizer and KV cache in the fuller phase: nothing that is estimated."""
        weights = self.engine_weights + self.policy_weights + self.reference
        sampling = self.kv_bytes + (0 if self.offloads else self.optimizer)
        training = self.gradients + self.optimizer + (0 if self.sleeps else self.kv_bytes)
        return weights + max(sampling, training)

    def takes(self, need: CacheNeed) -> bool:
        """Whether training fits, and beside it a KV cache of one sequence at full length."""
        empty = dataclasses.replace(self, kv_bytes=0)
        return self.room >= need.least and empty.remains("training") >= 0

    def with_cache(self, need: CacheNeed) -> MemoryPlan:
        """The plan with a KV cache of what one generation can use, as far as there is room."""
        return dataclasses.replace(self, kv_bytes=min(need.wanted, max(self.room, 0)))

    def with_cpu_cache(self, need: CacheNeed) -> MemoryPlan:
        """The same on a CPU, whose memory others use too: a quarter of what is free, but one full sequence always."""
        return dataclasses.replace(self, kv_bytes=max(need.least, min(need.wanted, self.available // CPU_SHARE)))

    def with_engine(self, weights: int, apart: int, kv_tokens: int) -> MemoryPlan:
        """The plan with what the engine, once built, holds, and the policy ``apart`` from it."""
        kv_bytes = self.kv_bytes or kv_tokens * self.kv_per_token
        return dataclasses.replace(
            self, engine_weights=weights, policy_weights=apart, kv_bytes=kv_bytes, kv_tokens=kv_tokens
        )

    def with_measured(self, tokens: int, peak: int) -> MemoryPlan:
        """The plan with a measured budget: ``peak`` bytes of forward and backward, gradients included."""
        held = self.gradients + self.exchange
        return dataclasses.replace(self, tokens=tokens, activations=max(peak - held, 0), measured=True)

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it. What is measured may go into the part that is kept free."""
        slack = self.margin if self.measured else 0
        return min(self.remains(phase) for phase in PHASES) + slack >= 0

    def lines(self) -> list[str]:
        """The plan as aligned lines, in GiB."""
        told = [row for row in self.rows() if row[0] not in OPTIONAL or row[2] >= GIB // 200]
        rows = [*told, ("remains", self.remains("sampling"), self.remains("training"))]
        of_ranks = "" if self.way == "none" else f", sharding {self.way} over {self.ranks}"
        head = f"memory of a rank{of_ranks}: {self.device}, {gib(self.total)} GiB"
        width = max(len(head), *(len(name) + 2 for name, _, _ in rows))
        lines = [f"{head:<{width}} {PHASES[0]:>9} {PHASES[1]:>9}"]
        return lines + [f"{f'  {name}':<{width}} {gib(a):>9} {gib(b):>9}" for name, a, b in rows]

    def table(self) -> str:
        """Its lines; the last one says so where it doesn't fit."""
        told = [] if self.fits else [f"  more is planned than there is: {self.remedies or REMEDIES}"]
        return "\n".join([*self.lines(), *told])


# Where nothing was tried out, as a plan fits until what was built or measured is known.
REMEDIES = "lower max_tokens_per_microbatch or vllm_max_model_length, or set gradient_checkpointing: true"


def gib(size: float) -> str:
    """Bytes as GiB, two digits."""
    return f"{size / GIB:.2f}"

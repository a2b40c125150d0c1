"""Weight sync `adapter`: a publish writes a LoRA adapter into vLLM's slots.

For each part of a fused layer (q, k and v), vLLM has tensors A (slots, 1, rank, in) and B (slots, 1, out, rank). vLLM
adds x A^T B^T to the part's output, where x is the layer's input. Unused elements of A and B are 0. The engine's B is
the policy's B times the LoRA scaling.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file

from ...engine.protocol import Engine
from ...engine.tensors import lora_stacks
from ...parallel.shards import Shard
from ...policy.lora import PREFIX, adapted_layers
from ...weights.sync import CopiedWeights, PlannedSync, SharedWeights, Unserved


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor (A or B) of the policy's adapter, and where the tensor goes in the engine."""

    layer: str
    kind: str  # lora_A or lora_B.
    source: torch.Tensor  # The policy's parameter, (rank, in) for A or (out, rank) for B.
    scaling: float  # The LoRA scaling for B, 1 for A.
    holder: Any  # vLLM's layer with the LoRA slots.
    part: int  # Index of the adapted layer among the parts of a fused vLLM layer.
    shard: Shard | None = None  # This rank's part of A or B. None: all of it.

    @property
    def stack(self) -> torch.Tensor:
        """vLLM's tensor with A or B of all LoRA slots of the layer. vLLM may replace the tensor during a run."""
        return lora_stacks(self.holder, self.kind)[self.part]

    @property
    def destination(self) -> torch.Tensor:
        """View of vLLM's first LoRA slot in the shape of ``source``. Outside of the view the slot has zeros."""
        rows, columns = self.source.shape
        return self.stack[0, 0, :rows, :columns]

    @property
    def fits(self) -> bool:
        rank, other = (-2, -1) if self.kind == "lora_A" else (-1, -2)
        stack, source = self.stack.shape, self.source.shape
        return stack[rank] >= source[rank] and stack[other] == source[other]

    def equal(self) -> bool:
        """Whether the engine's values equal the policy's scaled and rounded values bit for bit."""
        return torch.equal(self.destination, (self.source.detach() * self.scaling).to(self.stack.dtype))


class AdapterWeights(PlannedSync):
    """Weight sync of a PeftModel's adapter. ``base``: weight sync of the frozen base. Its `write` is called once."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slots: Sequence[Slot], base: CopiedWeights) -> None:
        self.slots, self.base = list(slots), base
        self.rank = max(slot.source.shape[0] for slot in slots if slot.kind == "lora_A")
        self._has_base = False
        self._destinations = [slot.destination for slot in slots]
        prove_slots(self.slots, self.rank, engine)
        super().__init__(policy, engine)  # Records tensors' addresses, which `prove_slots` may change.
        self._write_adapter()

    @property
    def nbytes(self) -> int:
        return sum(destination.nbytes for destination in self._destinations)

    def describe(self) -> str:
        layers, shared = len({slot.layer for slot in self.slots}), isinstance(self.base, SharedWeights)
        base = "shared with the engine" if shared else f"copied once ({self.base.why})"
        if self.engine.served is not None and (served := self.engine.served.weights):
            size = sum(weight.nbytes for weight in served) / 2**20
            base = f"quantised, one memory with the engine's ({len(served)} packed matrices, {size:,.1f} MiB)"
        elif packed := [part for part in self.base.slices if part.packed is not None]:
            size = sum(part.destination.nbytes for part in packed) / 2**20
            rest = ", the rest is shared" if shared else ""
            base = f"quantised, {len(packed)} matrices ({size:,.0f} MiB) dequantised into the engine once{rest}"
        return (
            f"weights: adapter, {len(self.slots)} tensors, {self.nbytes / 2**20:,.1f} MiB per publish (LoRA "
            f"r={self.rank} on {layers} layers; the base is frozen and {base}, nothing is merged into it)"
        )

    def write(self) -> int:
        if not self.engine.adapter_is_active:
            raise RuntimeError("vLLM's add_lora or remove_lora removed the trainer's adapter: build a new trainer.")
        self._write_adapter()
        of_base = 0 if self._has_base else self.base.write()
        self._has_base = True
        return of_base + self.nbytes

    def differing(self) -> list[str]:
        return [*self.base.differing(), *(f"{slot.layer}.{slot.kind}" for slot in self.slots if not slot.equal())]

    @torch.no_grad()
    def _write_adapter(self) -> None:
        sources, scalings = [slot.source.detach() for slot in self.slots], [slot.scaling for slot in self.slots]
        torch._foreach_copy_(self._destinations, torch._foreach_mul(sources, scalings))

    def _addresses(self) -> dict[str, int]:
        slots = {f"engine {slot.layer}.{slot.kind}": slot.stack.data_ptr() for slot in self.slots}
        return super()._addresses() | slots


def map_adapter(policy: torch.nn.Module, engine: Engine, shards: Mapping[int, Shard] | None = None) -> list[Slot]:
    """Return the engine's LoRA slot of every tensor of the policy's adapter. Raise `Unserved` if vLLM lacks one.
    ``shards`` maps `id(parameter)` to this rank's shard."""
    # A layer's name in vLLM -> the vLLM layer with its LoRA slots, and its index among the fused parts.
    holders, tensors = dict[str, tuple[Any, int]](), engine.tensors
    for name, holder in tensors.lora_layers().items():
        head, _, last = name.rpartition(".")
        count, names = len(lora_stacks(holder, "lora_A")), ([last], tensors.fusions.get(last, ()))
        parts = next((each for each in names if len(each) == count), ())
        holders |= {f"{head}.{part}": (holder, index) for index, part in enumerate(parts)}
    slots, missing, cut = [], [], shards or {}
    for layer in adapted_layers(policy):
        holder, part = holders.get(tensors.renamed(layer.parameter).removesuffix(".weight"), (None, 0))
        pair = [
            Slot(layer.name, "lora_A", layer.lora_a, 1.0, holder, part, cut.get(id(layer.lora_a))),
            Slot(layer.name, "lora_B", layer.lora_b, layer.scaling, holder, part, cut.get(id(layer.lora_b))),
        ]
        if holder is None or not all(slot.fits for slot in pair):
            missing.append(layer.name)
        slots += pair
    if missing:
        raise Unserved(f"vLLM has no LoRA slot for {len(missing)} adapted layers ({', '.join(missing[:3])})")
    return slots


@torch.no_grad()
def prove_slots(slots: Sequence[Slot], rank: int, engine: Engine) -> None:
    """Raise a RuntimeError unless vLLM loads an adapter of random numbers into ``slots`` and nowhere else."""
    import peft

    generator = torch.Generator().manual_seed(0)
    shapes = [slot.source.shape if slot.shard is None else slot.shard.shape for slot in slots]
    probes = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        targets = sorted({slot.layer.rpartition(".")[2] for slot in slots})
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=targets)
        config.save_pretrained(folder)
        tensors = {f"{PREFIX}{slot.layer}.{slot.kind}.weight": v for slot, v in zip(slots, probes, strict=True)}
        save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
        engine.load_adapter(folder)
    for slot, probe in zip(slots, probes, strict=True):
        own = probe if slot.shard is None else slot.shard.of(probe)
        if not torch.equal(slot.destination, own.to(slot.destination)):
            raise RuntimeError(
                f"vLLM stores {slot.layer}.{slot.kind} elsewhere than expected: Colograd doesn't know this "
                "architecture's layout of LoRA layers yet. Set `weights: copied` to merge the adapter into the "
                "engine's copy. If `sharding` begins with 'tensor', set `sharding: gradients`, too."
            )
    torch._foreach_zero_([slot.destination for slot in slots])
    for name, holder in engine.tensors.lora_layers().items():
        if any(bool(stack.any()) for kind in ("lora_A", "lora_B") for stack in lora_stacks(holder, kind)):
            raise RuntimeError(
                f"vLLM stored values of a LoRA adapter for {name} outside the slots that Colograd writes. Set "
                "`weights: copied`. If `sharding` begins with 'tensor', set `sharding: gradients`, too."
            )

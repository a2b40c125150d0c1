"""`adapter`: LoRA. The base is published once; each publish writes only the adapter, into vLLM's own LoRA slots.

For each layer that may be adapted vLLM has zeroed stacks for A (slots, 1, rank, in) and B (slots, 1, out, rank), one
pair per part of a fused layer, and adds x A' B' to the layer's output. The scaling is folded into B. The plan is
proved with an adapter of random numbers that vLLM itself loads from a folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file

from ...engine.protocol import Engine, LoRALayer
from ...parallel.shards import Shard
from ...policy.lora import PREFIX, adapted_layers
from ...weights.copied import CopiedWeights
from ...weights.shared import SharedWeights
from ...weights.sync import PlannedSync, Unserved


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the adapter and its place in the engine."""

    layer: str  # name of the adapted layer
    kind: str  # lora_A or lora_B
    source: torch.Tensor  # the policy's parameter, (rank, in) or (out, rank)
    scaling: float  # factor on the way to the engine; 1 for A
    holder: LoRALayer  # the engine's layer that has the slots
    part: int  # index among the holder's fused parts
    shard: Shard | None = None  # the source's part of the adapter's tensor; None: the whole tensor

    @property
    def stack(self) -> torch.Tensor:
        """The holder's present tensor of all slots. It may be another one than at the start."""
        return self.holder.stacks(self.kind)[self.part]

    @property
    def destination(self) -> torch.Tensor:
        """A view of the first slot, in the source's shape. The rest of the slot's rank stays zero."""
        rows, columns = self.source.shape
        return self.stack[0, 0, :rows, :columns]

    def equal(self) -> bool:
        """Return whether the engine has the policy's value, scaled and rounded once, bit for bit."""
        expected = self.source.detach() * self.scaling
        return torch.equal(self.destination, expected.to(self.stack.dtype))


class AdapterWeights(PlannedSync):
    """Publishes the adapter of a PeftModel into the engine's first LoRA slot, and the frozen base once.

    Args:
        policy: the PeftModel.
        engine: the engine.
        slots: the slot of each tensor of the adapter, from `map_adapter`.
        base: publishes the base.
    """

    def __init__(self, policy: torch.nn.Module, engine: Engine, slots: Sequence[Slot], base: CopiedWeights) -> None:
        self.slots, self.base = list(slots), base
        self.rank = max(slot.source.shape[0] for slot in slots if slot.kind == "lora_A")
        self._has_base = False
        self._sources = [slot.source.detach() for slot in slots]
        self._scalings = [slot.scaling for slot in slots]
        self._destinations = [slot.destination for slot in slots]
        prove_slots(self.slots, self.rank, engine)
        super().__init__(policy, engine)  # records all addresses, so it comes after the proof
        self._stacks = self._stack_pointers()
        self._write_adapter()

    @property
    def nbytes(self) -> int:
        return sum(destination.nbytes for destination in self._destinations)

    def describe(self) -> str:
        layers, shared = len({slot.layer for slot in self.slots}), isinstance(self.base, SharedWeights)
        base = "shared with the engine" if shared else f"copied once ({self.base.why})"
        if served := self.engine.served.weights:
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
        """Write the adapter, and in the first call the base. Return the bytes written."""
        if self._stack_pointers() != self._stacks or not self.engine.adapter_is_active:
            raise RuntimeError(
                "A LoRA slot of the engine has moved since publishing was planned, or has another adapter (after a "
                "reload or add_lora). Build a new trainer."
            )
        base_bytes = 0 if self._has_base else self.base.write()
        self._has_base = True
        self._write_adapter()
        return base_bytes + self.nbytes

    def differing(self) -> list[str]:
        return [*self.base.differing(), *(f"{slot.layer}.{slot.kind}" for slot in self.slots if not slot.equal())]

    @torch.no_grad()
    def _write_adapter(self) -> None:
        torch._foreach_copy_(self._destinations, torch._foreach_mul(self._sources, self._scalings))

    def _stack_pointers(self) -> list[int]:
        return [slot.stack.data_ptr() for slot in self.slots]


def map_adapter(policy: torch.nn.Module, engine: Engine, shards: Mapping[int, Shard] | None = None) -> list[Slot]:
    """Return the engine's slot of every tensor of the policy's adapter. ``shards``: parts of the adapter's tensors by
    the tensors' `id`, if the policy is in parts."""
    slots, missing, holders = [], [], engine.tensors.lora_layers()
    for layer in adapted_layers(policy):
        name = engine.tensors.renamed(layer.parameter).removesuffix(".weight")
        last = name.rpartition(".")[2]
        holder: Any = None  # the engine's layer that has the slots
        part = 0  # index of the layer's part in it
        for fused, parts in ((last, [last]), *engine.tensors.fusions.items()):
            found = holders.get(name.removesuffix(last) + fused)
            if last in parts and found is not None and len(found.stacks("lora_A")) == len(parts):
                holder, part = found, parts.index(last)
                break
        shard_a, shard_b = ((shards or {}).get(id(tensor)) for tensor in (layer.lora_a, layer.lora_b))
        a = Slot(layer.name, "lora_A", layer.lora_a, 1.0, holder, part, shard_a)
        pair = [a, Slot(layer.name, "lora_B", layer.lora_b, layer.scaling, holder, part, shard_b)]
        if holder is None or not all(_fits(slot) for slot in pair):
            missing.append(layer.name)
        slots += pair
    if missing:
        raise Unserved(f"vLLM has no LoRA slot for {len(missing)} adapted layers: {', '.join(missing[:3])}")
    return slots


def _fits(slot: Slot) -> bool:
    stack, (rows, columns) = slot.stack.shape, slot.source.shape
    if slot.kind == "lora_A":
        return stack[-1] == columns and stack[-2] >= rows
    return stack[-2] == rows and stack[-1] >= columns


@torch.no_grad()
def prove_slots(slots: Sequence[Slot], rank: int, engine: Engine) -> None:
    """Check that vLLM loads an adapter of random numbers exactly to the planned places, and set these to zero."""
    import peft

    generator = torch.Generator().manual_seed(0)
    shapes = [slot.source.shape if slot.shard is None else slot.shard.shape for slot in slots]  # of whole tensors
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
                f"vLLM stores {slot.layer}.{slot.kind} in another place than expected: Colograd doesn't know this "
                "architecture's layout of LoRA layers yet. Set weights: copied (the adapter is then merged into the "
                "engine's copy)."
            )
    torch._foreach_zero_([slot.destination for slot in slots])
    for name, holder in engine.tensors.lora_layers().items():
        if any(bool(stack.any()) for kind in ("lora_A", "lora_B") for stack in holder.stacks(kind)):
            raise RuntimeError(f"vLLM's LoRA slot of {name} has values outside the adapter. Set weights: copied.")

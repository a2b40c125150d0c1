"""`copied` for an adapter that vLLM can't serve: the engine's tensors are W + scaling * B A, computed out of place.

The policy is never merged and unmerged (which drifts in bfloat16): each publish computes the matrices of the adapted
layers in float32, one layer at a time, and rounds them once into the engine's tensors.
"""

from __future__ import annotations

import torch

from ..engine import Engine
from ..lora import adapted_layers, base_name, trained_copies
from .copied import MOVED, CopiedWeights
from .mapping import Slice


class MergedWeights:
    """Publishes a PeftModel as the weights it amounts to.

    Args:
        policy: a PeftModel; its base is copied at the first publish only.
        engine: without the adapter.
        reason: why the adapter isn't served, for `describe`.
    """

    way = "copied"

    def __init__(self, policy: torch.nn.Module, engine: Engine, reason: str) -> None:
        self.engine, self.reason = engine, reason
        adapted = {f"{layer.name}.weight": layer for layer in adapted_layers(policy)}
        copies = dict(trained_copies(policy))
        self.base = CopiedWeights(policy, engine)
        slices = {base_name(part.name) or part.name: part for part in self.base.slices}
        moving = {*adapted, *copies, *(name for name, part in slices.items() if part.source.requires_grad)}
        self._still = [part for name, part in slices.items() if name not in moving]
        self._merged = [(layer, slices[name].destination) for name, layer in adapted.items()]
        self._whole = [Slice(name, copy, slices[name].destination) for name, copy in copies.items()]
        self._whole += [part for name, part in slices.items() if part.source.requires_grad and name not in adapted]
        self._base_is_there = False
        self._pointers = self._data_pointers()

    @property
    def nbytes(self) -> int:
        """Bytes that a publish writes, after the first."""
        moving = [d for _, d in self._merged] + [part.destination for part in self._whole]
        return sum(d.numel() * d.element_size() for d in moving)

    def describe(self) -> str:
        tensors = len(self._merged) + len(self._whole)
        return (
            f"weights: copied, {tensors} tensors, {self.nbytes / 2**20:,.1f} MiB per publish "
            f"(the adapter is merged on its way into the engine's copy: {self.reason})"
        )

    @torch.no_grad()
    def publish(self, version: int) -> int:
        """Make the policy's weights the engine's, and stamp it with ``version``. Returns the bytes written.

        Raises:
            RuntimeError: a tensor of the policy or the engine has moved since the plan was made.
        """
        self.engine.version = None
        if self._data_pointers() != self._pointers:
            raise RuntimeError(MOVED)
        parts, moved = list(self._whole), self.nbytes
        if not self._base_is_there:
            parts += self._still
            moved += sum(part.destination.numel() * part.destination.element_size() for part in self._still)
        if parts:
            torch._foreach_copy_([part.destination for part in parts], [part.source.detach() for part in parts])
        for layer, destination in self._merged:
            destination.copy_(layer.merged())
        self._base_is_there = True
        self.engine.stamp(version)
        return moved

    def differing(self) -> list[str]:
        """Names of weights whose value in the engine isn't the policy's, merged in float32 and rounded once."""
        names = [part.name for part in (*self._still, *self._whole) if not part.equal()]
        for layer, destination in self._merged:
            if not torch.equal(destination, layer.merged().to(destination.dtype)):
                names.append(f"{layer.name}.weight")
        return names

    def _data_pointers(self) -> list[int]:
        parts = (*self._still, *self._whole)
        pointers = [tensor.data_ptr() for part in parts for tensor in (part.source, part.destination)]
        for layer, destination in self._merged:
            base = layer.module.get_base_layer().weight
            pointers += [t.data_ptr() for t in (base, layer.lora_a, layer.lora_b, destination)]
        return pointers

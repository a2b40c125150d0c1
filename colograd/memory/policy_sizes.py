"""`PolicySizes`: elements and bytes of a whole policy, its gradients and its optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..config.policy import KEEPS_MASTER
from ..policy.packed_weights import packed_weights


@dataclass(frozen=True, slots=True)
class PolicySizes:
    elements: int
    trained: int  # elements
    weights: int  # bytes
    gradients: int  # bytes, in the dtype of their accumulation
    optimizer: int  # bytes of state after its first step
    itemsize: int  # bytes per element of the policy's dtype
    gradient_itemsize: int
    largest: int  # elements of the largest trained parameter
    block: int  # elements of the largest decoder layer
    rest: int  # elements outside of the decoder's layers: embedding, head
    packed: int = 0  # bytes of quantised weights with their scales
    packed_elements: int = 0  # elements of the quantised matrices
    matrix: int = 0  # elements of the largest trained parameter of a decoder layer

    @classmethod
    def of(
        cls, model: torch.nn.Module, optim: str, itemsize: int, to_pack: Mapping[torch.Tensor, int] | None = None
    ) -> PolicySizes:
        """Compute the sizes of a model, also on the meta device. Its frozen parameters must be marked. ``to_pack`` has
        the quantised bytes of parameters that loading will quantise; default: already packed ones."""
        if to_pack is None:
            found = packed_weights(model)
            packed = {p: found[name].nbytes for name, p in model.named_parameters() if name in found}
            matrices = {p: found[name].shape.numel() for name, p in model.named_parameters() if name in found}
        else:
            packed, matrices = dict(to_pack), {p: p.numel() for p in to_pack}

        def elements(module: torch.nn.Module) -> int:
            return sum(matrices.get(p, p.numel()) for p in module.parameters())

        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        decoder = max(lists, key=elements, default=())  # the largest list
        layers, own = [elements(layer) for layer in decoder], (p for layer in decoder for p in layer.parameters())
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        gradients, whole = gradient_bytes(model, optim), elements(model)
        return cls(
            elements=whole,
            trained=sum(trained),
            weights=sum(packed.get(p, p.nbytes) for p in model.parameters()),
            gradients=gradients,
            optimizer=optimizer_bytes(model, optim),
            itemsize=itemsize,
            gradient_itemsize=-(-gradients // max(sum(trained), 1)),
            largest=max(trained, default=0),
            block=max(layers, default=0),
            rest=whole - sum(layers),
            packed=sum(packed.values()),
            packed_elements=sum(matrices.values()),
            matrix=max((p.numel() for p in own if p.requires_grad), default=0),
        )


def gradient_bytes(model: torch.nn.Module, optim: str = "") -> int:
    """Count the bytes of all gradients. For optimizers that keep a float32 master, they accumulate in float32."""
    trained = (p for p in model.parameters() if p.requires_grad)
    if optim in KEEPS_MASTER:
        return sum(4 * p.numel() for p in trained)
    return sum(p.numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize for p in trained)


def optimizer_bytes(model: torch.nn.Module, optim: str) -> int:
    """Count the bytes of the optimizer's state after its first step; for optimizers smaller than AdamW an upper bound.

    `adamw_split` keeps 10 for a bfloat16 parameter (two float32 moments, 16 bits of remainder) and 8 for a float32
    one. `muon` keeps four less for a matrix, but its own temporaries take that space. torch's AdamW keeps two moments
    in the parameter's dtype; optimizers named 8bit keep one byte per moment.
    """
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad and optim in KEEPS_MASTER:
            total += parameter.numel() * (10 if parameter.dtype == torch.bfloat16 else 8)
        elif parameter.requires_grad and optim != "sgd":
            total += parameter.numel() * 2 * (1 if "8bit" in optim else parameter.dtype.itemsize)
    return total

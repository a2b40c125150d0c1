"""`PolicySizes`: numbers of elements, and bytes, of a policy, its gradients and its optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..config.policy import KEEPS_MASTER
from ..policy.packed_weights import packed_weights


@dataclass(frozen=True, slots=True)
class PolicySizes:
    elements: int
    trained: int  # Elements of trained parameters.
    weights: int  # Bytes of all weights.
    gradients: int  # Bytes of gradients, in the dtype in which they are accumulated.
    optimizer: int  # Bytes of the optimizer's state after its first step.
    itemsize: int  # Bytes per element of the policy's dtype.
    gradient_itemsize: int  # Bytes per element of gradients.
    largest: int  # Elements of the largest trained parameter.
    block: int  # Elements of the largest decoder layer.
    rest: int  # Elements outside of the decoder's layers, i.e. embedding and head.
    packed: int = 0  # Bytes of quantised weights with their scales.
    packed_elements: int = 0  # Elements of quantised matrices.
    matrix: int = 0  # Elements of the largest trained parameter in a decoder layer.

    @classmethod
    def of(
        cls, model: torch.nn.Module, optim: str, itemsize: int, to_pack: Mapping[torch.Tensor, int] | None = None
    ) -> PolicySizes:
        """Compute the sizes of a model with marked frozen parameters. The model may be on the meta device. ``to_pack``
        has the quantised bytes of parameters that loading will quantise. By default the model's quantised weights
        count."""
        if to_pack is None:
            found = packed_weights(model)
            packed = {p: found[name].nbytes for name, p in model.named_parameters() if name in found}
            matrices = {p: found[name].shape.numel() for name, p in model.named_parameters() if name in found}
        else:
            packed, matrices = dict(to_pack), {p: p.numel() for p in to_pack}

        def elements(module: torch.nn.Module) -> int:
            return sum(matrices.get(p, p.numel()) for p in module.parameters())

        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        decoder = max(lists, key=elements, default=())  # the decoder is the largest list
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
    """Count the bytes of all gradients. Optimizers with a float32 master copy of weights have float32 gradients."""
    trained = (p for p in model.parameters() if p.requires_grad)
    if optim in KEEPS_MASTER:
        return sum(4 * p.numel() for p in trained)
    return sum(p.numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize for p in trained)


def optimizer_bytes(model: torch.nn.Module, optim: str) -> int:
    """Count the bytes of the optimizer's state after its first step. For optimizers smaller than AdamW an upper bound.

    `adamw_split` has 10 bytes per element of a bfloat16 parameter (two float32 moments, 16 bits of remainder), and 8
    per element of a float32 parameter. `muon` has four bytes less for matrices, but its temporaries take that space.
    torch's AdamW has two moments in the parameter's dtype. Optimizers named 8bit have one byte per moment.
    """
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad and optim in KEEPS_MASTER:
            total += parameter.numel() * (10 if parameter.dtype == torch.bfloat16 else 8)
        elif parameter.requires_grad and optim != "sgd":
            total += parameter.numel() * 2 * (1 if "8bit" in optim else parameter.dtype.itemsize)
    return total

"""What a policy takes on one rank, for each way in which the ranks share it out: numbers in, bytes out.

Bytes per parameter on each of N ranks, T of them per engine, of a bfloat16 policy with `adamw_split`:

    way         engine   policy            gradients   optimizer state   for a while
    none        2/T      0 (T = 1) or 2    4           10                nothing
    optimizer   2/T      0 or 2            4           10/N              buckets on their way
    gradients   2/T      0 or 2            4/N         10/N              buckets on their way
    fsdp        2/T      2/N               4/N         10/N              the largest block, gathered and summed

With T = 1 the policy's parameters are the engine's tensors, but for those of a quantised base, which has half a byte or
one for each beside the engine's 2. With more, each rank holds the policy whole and copies it
into its part of the engine; in the engine's own layout (`in_layout`) it would hold that part only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ..policy.quantized_layers import packed_weights
from ..sharding.buckets import ELEMENTS
from ..sharding.zero import IN_FLIGHT

WAYS = ("none", "optimizer", "gradients", "fsdp")  # the least sharded first
ALIVE = IN_FLIGHT + 2  # buckets at once: those being summed, one being filled, one being made flat
GATHERED = 4  # times a block's weights are there with FSDP: as they came and as they are used, and the next one's too
SUMMED = 2  # times its gradients are: as they were made, and on their way


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """A whole policy."""

    elements: int
    trained: int  # elements
    weights: int  # bytes
    gradients: int  # bytes, in the dtype in which they accumulate
    optimizer: int  # bytes of state after its first step
    itemsize: int  # of its dtype
    gradient_itemsize: int
    largest: int  # elements of the largest trained parameter
    block: int  # elements of the largest decoder layer
    rest: int  # elements outside of the decoder's layers: embedding, head
    packed: int = 0  # bytes of quantised weights with their scales, which are never the engine's own
    packed_elements: int = 0  # of the matrices that they are

    @classmethod
    def of(
        cls, model: torch.nn.Module, optim: str, itemsize: int, to_pack: Mapping[torch.Tensor, int] | None = None
    ) -> PolicySizes:
        """Of a model on any device, the meta device too, with frozen parameters marked as such.

        Args:
            to_pack: parameters that will be quantised, with the bytes that they then take; default: what is already.
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        packed = _packed(model) if to_pack is None else to_pack
        dense = sum(p.nbytes for p in model.parameters() if p not in packed)
        numel = sum(p.numel() for p in trained)
        gradients, layers = gradient_bytes(model, optim), [_elements(layer) for layer in _layers(model)]
        elements = _elements(model)
        return cls(
            elements=elements,
            trained=numel,
            weights=dense + sum(packed.values()),
            gradients=gradients,
            optimizer=optimizer_bytes(model, optim),
            itemsize=itemsize,
            gradient_itemsize=-(-gradients // max(numel, 1)),
            largest=max((p.numel() for p in trained), default=0),
            block=max(layers, default=0),
            rest=elements - sum(layers),
            packed=sum(packed.values()),
            packed_elements=_packed_elements(model) if to_pack is None else sum(p.numel() for p in packed),
        )

    def with_adapter(self, trained: int) -> PolicySizes:
        """The same model below a LoRA adapter of ``trained`` elements in its dtype, with this optimizer."""
        share = trained / max(self.trained, 1)
        return PolicySizes(
            elements=self.elements + trained,
            trained=trained,
            weights=self.weights + trained * self.itemsize,
            gradients=int(self.gradients * share),
            optimizer=int(self.optimizer * share),
            itemsize=self.itemsize,
            gradient_itemsize=self.gradient_itemsize,
            largest=0,
            block=self.block,
            rest=self.rest,
            packed=self.packed,
            packed_elements=self.packed_elements,
        )


def _packed(model: torch.nn.Module) -> dict[torch.Tensor, int]:
    """The bytes of each quantised parameter."""
    found = packed_weights(model)
    return {p: found[name].nbytes for name, p in model.named_parameters() if name in found}


def _packed_elements(model: torch.nn.Module) -> int:
    return sum(weight.shape.numel() for weight in packed_weights(model).values())


def _elements(module: torch.nn.Module) -> int:
    """Of a quantised weight, those of the matrix."""
    packed = packed_weights(module)
    return sum(packed[name].shape.numel() if name in packed else p.numel() for name, p in module.named_parameters())


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The decoder's layers: of the lists of modules in it, the one with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return iter(max(lists, key=_elements, default=()))


def gradient_bytes(model: torch.nn.Module, optim: str = "") -> int:
    """Of the trained parameters, in the dtype in which their gradients accumulate: float32 for `adamw_split`."""
    trained = (p for p in model.parameters() if p.requires_grad)
    if optim == "adamw_split":
        return sum(4 * p.numel() for p in trained)
    return sum(p.numel() * (getattr(p, "grad_dtype", None) or p.dtype).itemsize for p in trained)


def optimizer_bytes(model: torch.nn.Module, optim: str) -> int:
    """State of the optimizer after its first step; for optimizers that aren't AdamW, which keep less, a bound."""
    return sum(p.numel() * state_itemsize(p.dtype, optim) for p in model.parameters() if p.requires_grad)


def state_itemsize(dtype: torch.dtype, optim: str) -> int:
    """Bytes of state per parameter.

    `adamw_split` keeps 10 for a bfloat16 parameter (two float32 moments, 16 bits of remainder) and 8 for a float32
    one; torch's AdamW keeps two moments in the parameter's dtype; those named 8bit one byte each.
    """
    if optim == "sgd":
        return 0
    if optim == "adamw_split":
        return 10 if dtype == torch.bfloat16 else 8
    return 2 * (1 if "8bit" in optim else dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one rank."""

    engine: int  # its weights
    policy: int  # its weights; 0: they are the engine's
    gradients: int  # from a step's first backward to its optimizer
    optimizer: int
    exchange: int  # for a while: gradients on their way to other ranks, or weights gathered from them


def held(
    way: str,
    sizes: PolicySizes,
    ranks: int,
    ranks_per_engine: int = 1,
    engine_itemsize: int = 2,
    shared: bool = True,
    in_layout: bool = False,
    reshard: bool = True,
    offload: bool = False,
    served: bool = False,
) -> Held:
    """What one of ``ranks`` holds.

    Args:
        way: one of `WAYS`.
        engine_itemsize: bytes of one of the engine's weights.
        shared: the policy's parameters may be the engine's own tensors (they can't if that is cut, nor with FSDP).
        in_layout: the policy is cut as the engine is, instead of being whole on each rank.
        served: the engine reads the policy's quantised weights.
        reshard, offload: with FSDP, forget gathered weights after a forward; keep what each rank owns on its host.
    """
    assert way in WAYS, way
    whole_there = sizes.elements - (sizes.packed_elements if served else 0)
    engine = whole_there * engine_itemsize // ranks_per_engine
    if way == "fsdp":
        return _fsdp(sizes, 0 if offload else ranks, engine, reshard)
    cut = ranks_per_engine if in_layout else 1  # parts of the policy
    whole = ranks_per_engine == 1 or in_layout
    return Held(
        engine=engine,
        policy=sizes.packed if shared and whole else sizes.weights // cut,
        gradients=sizes.gradients // (ranks if way == "gradients" else cut),
        optimizer=sizes.optimizer // (cut if way == "none" else ranks),
        exchange=0 if way == "none" or ranks == cut else _buckets(sizes, ranks, cut),
    )


def _buckets(sizes: PolicySizes, ranks: int, cut: int) -> int:
    """Gradients of the buckets that are on their way, and this rank's part of their sums."""
    large = sizes.largest // cut
    elements = min(sizes.trained // cut, ALIVE * ELEMENTS + (large if large > ELEMENTS else 0))
    return sizes.gradient_itemsize * (elements + elements // (ranks // cut))


def _fsdp(sizes: PolicySizes, ranks: int, engine: int, reshard: bool) -> Held:
    """Everything is cut, and owned by ``ranks``; 0: by their hosts.

    And of the largest block (a layer, the head, the embedding) there is what a pass makes of it: of a bfloat16 policy
    tests/sharding/test_fsdp.py finds 13 to 15.5 bytes per element.
    """
    largest = max(sizes.block, sizes.largest)
    kept = 0 if reshard else sizes.itemsize * (sizes.elements - sizes.rest)
    return Held(
        engine=engine,
        policy=sizes.weights // ranks if ranks else 0,
        gradients=sizes.gradients // ranks if ranks else 0,
        optimizer=sizes.optimizer // ranks if ranks else 0,
        exchange=kept + (GATHERED * sizes.itemsize + SUMMED * sizes.gradient_itemsize) * largest,
    )

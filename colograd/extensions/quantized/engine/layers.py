"""vLLM layers that multiply with the policy's packed (quantised) weights, so that engine and policy share one copy.
A custom operator makes the products, so that CUDA graphs and compiled code can contain them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ....config import GRPOConfig
from ....engine.building import replaced
from ....engine.protocol import EngineFeature, EngineUse
from ....engine.tensors import VLLMTensors
from ....policy.lora import PackedWeight, base_name, packed_weights
from ....weights.mapping import TOWER

Parts = Mapping[str, Sequence[PackedWeight]]  # Weights by a layer's name in vLLM. A fused layer has several (q, k, v).

_parts: dict[int, Sequence[PackedWeight]] = {}  # Packed weights by layer number, for all engines of the process.
_used: set[int] = set()  # Numbers of layers that have made a product.


@torch.library.custom_op(
    "colograd::packed_linear", mutates_args=(), schema="(Tensor x, int layer, int width) -> Tensor"
)
def packed_linear(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """Multiply x (..., in) with each packed weight of a layer, and join the products to (..., width)."""
    _used.add(layer)
    products = [part.product(x) for part in _parts[layer]]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


@packed_linear.register_fake
def _(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], width)


class ServedLayers(EngineFeature):
    """Layers of one engine that read the policy's packed weights."""

    blank = True

    def __init__(self, parts_of: Callable[[VLLMTensors], Parts]) -> None:
        self._parts_of = parts_of
        self.numbers: dict[int, Sequence[PackedWeight]] = {}  # Packed weights by layer number.
        self.reserved: dict[str, int] = {}  # Layer numbers by layer name.

    def built(self, engine: Any) -> None:
        engine.served = self

    @property
    def weights(self) -> list[PackedWeight]:
        return [part for parts in self.numbers.values() for part in parts]

    def unused(self, but: Collection[PackedWeight] = ()) -> int:
        """Count layers that haven't multiplied by their weight yet. A layer with a weight in ``but`` isn't counted."""
        return sum(1 for number, parts in self.numbers.items() if number not in _used and not {*parts} & {*but})

    def reserve(self, names: Iterable[str]) -> None:
        """Give each layer a number that no other engine of the process uses."""
        self.reserved = {name: number for number, name in enumerate(names, max(_parts, default=-1) + 1)}

    @property
    def digest(self) -> str:
        """Hash of the layers' names and numbers, for vLLM's compile cache: compiled code contains the numbers."""
        return hashlib.sha256(repr(self.reserved).encode()).hexdigest()

    def add(self, name: str, parts: Sequence[PackedWeight]) -> int:
        number = self.reserved[name]
        self.numbers[number] = _parts[number] = parts
        return number

    def close(self) -> None:
        for number in self.numbers:
            _parts.pop(number, None)
            _used.discard(number)
        self.numbers = {}

    @contextlib.contextmanager
    def while_built(self) -> Iterator[None]:
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
        from vllm.model_executor.model_loader.utils import get_model_architecture

        theirs, served = UnquantizedLinearMethod.create_weights, self
        found: list[Parts] = []

        class ReadsPolicy(LinearMethodBase):
            def __init__(self, number: int, width: int) -> None:
                self.number, self.width = number, width

            def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
                """Register an empty weight, because vLLM reads a layer's device from its weight."""
                layer.register_parameter("weight", torch.nn.Parameter(torch.empty(0), requires_grad=False))

            def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
                y = torch.ops.colograd.packed_linear(x, self.number, self.width)
                return y if bias is None else y + bias

        def create(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
            config, name = get_current_vllm_config(), getattr(layer, "prefix", "")
            if not found:  # Only at the first layer: at later layers `config` may be a submodel's.
                architecture, _ = get_model_architecture(config.model_config)
                found.append(served._parts_of(VLLMTensors(architecture)))
                served.reserve(found[0])
            # Compiled code contains layer numbers, so vLLM's key of its compile cache must depend on them.
            config.additional_config = {**config.additional_config, "colograd_packed_layers": served.digest}
            if (parts := found[0].get(name)) is None:
                theirs(self, layer, *args, **kwargs)
                return
            layer.quant_method = ReadsPolicy(served.add(name, parts), sum(part.shape[0] for part in parts))
            layer.quant_method.create_weights(layer)

        try:
            with replaced(UnquantizedLinearMethod, "create_weights", create):
                yield
        except BaseException:
            self.close()
            raise


def served_layers(config: GRPOConfig, use: EngineUse) -> ServedLayers | None:
    policy = use.policy
    if policy is None or policy.quantization is None or config.weights != "shared":
        return None
    return ServedLayers(partial(packed_parts, policy.model))


def packed_parts(policy: torch.nn.Module, engine: VLLMTensors) -> dict[str, list[PackedWeight]]:
    """Return packed weights of the policy by layer name in vLLM. A fused layer has several, in vLLM's order."""
    weights = {base_name(name): weight for name, weight in packed_weights(policy).items()}
    packed = {engine.renamed(str(name)).removesuffix(".weight"): weight for name, weight in weights.items()}
    packed |= {name.replace(*TOWER, 1): weight for name, weight in packed.items() if name.startswith(TOWER[0])}
    layers = {name: [weight] for name, weight in packed.items()}
    for name in packed:
        head, _, last = name.rpartition(".")
        for fused, parts in engine.fusions.items():
            names = [f"{head}.{part}" for part in parts]
            if last in parts and all(part in packed for part in names):
                layers[f"{head}.{fused}"] = [packed[part] for part in names]
    return layers

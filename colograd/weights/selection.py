"""The selection and proof of a run's `WeightSync`, with one function per kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..batch import ModelInput
from ..config import GRPOConfig
from ..engine.arguments import engine_dtype
from ..engine.protocol import Engine
from ..extensions.images.towers import sees
from ..extensions.quantized.layers import packed_weights
from ..extensions.tensor_parallel.layers import adapter_shards, split
from ..parallel.ranks import on_all_ranks
from ..parallel.shards import Shard
from ..policy.loading import Policy
from ..policy.lora import Adapter, adapted_layers, base_name
from ..runtime.importing import find_object, is_import_path
from . import proof, shared
from .adapter import AdapterWeights, Unserved, map_adapter
from .copied import CopiedWeights, Copies, MergedWeights
from .gathered import GatheredWeights
from .mapping import Slice, map_parameters
from .row_order import with_row_orders
from .shared import SharedWeights
from .sync import WeightSync


@dataclass(frozen=True, slots=True)
class Sides:
    """The policy and the engine, before a `WeightSync` is chosen."""

    policy: torch.nn.Module
    engine: Engine
    slices: list[Slice]  # every parameter of the policy, or of a LoRA policy's base, and its place in the engine
    device: torch.device  # the policy's final device
    equal: bool  # every slice has its parameter's value, checked after both sides loaded one checkpoint
    seen: ModelInput | None = None  # a prompt with images


def _move(policy: torch.nn.Module, device: torch.device) -> None:
    """Move a policy to a device, unless it is there."""
    if any(tensor.device.type != device.type for tensor in [*policy.parameters(), *policy.buffers()]):
        policy.to(device)  # conditional, because `.to("cpu:0")` copies tensors on "cpu" and would undo the sharing


def check_choice(wanted: str, adapter: Adapter | None, cut: bool = False) -> Adapter | None:
    """Check that a policy and its adapter allow the setting `weights`.

    Args:
        wanted: the setting.
        adapter: the policy's adapter.
        cut: each rank will have only a part of the policy's weights.

    Returns:
        The adapter that needs slots in the engine; None if there is no adapter, or it is merged.

    Raises:
        ValueError: the setting can't be used.
    """
    if cut and adapter is not None:
        raise ValueError(
            "sharding is 'fsdp', but the policy trains a LoRA adapter, and its frozen base is in the engine's memory "
            "anyway: set sharding: gradients, which cuts the adapter's gradients and optimizer state."
        )
    if cut and wanted not in ("auto", "gathered"):
        raise ValueError(
            f"weights is {wanted!r} and sharding is 'fsdp', but no rank holds weights whole to share or copy: set "
            "weights: auto (they are gathered), or sharding: gradients, which doesn't cut weights."
        )
    if wanted == "gathered" and not cut:
        raise ValueError(
            "weights is 'gathered', but each rank holds the whole policy: set weights: auto, or sharding: fsdp on "
            "several ranks."
        )
    if is_import_path(wanted):
        find_weight_sync(wanted)
        if adapter is not None:
            raise ValueError(
                f"weights is {wanted!r}, but the policy trains a LoRA adapter, and your own class publishes whole "
                "weights: set use_peft: false (or remove peft_config), or set weights: auto."
            )
    if wanted == "adapter" and adapter is None:
        raise ValueError(
            "weights is 'adapter', but the policy is trained whole: set use_peft: true (or pass peft_config), or set "
            "weights: auto."
        )
    if adapter is None or wanted == "copied":
        return None
    if wanted != "auto" and adapter.why_merged:
        raise ValueError(f"weights is {wanted!r}, but {adapter.why_merged}: set weights: auto (merged copies).")
    return None if adapter.why_merged else adapter


def check_adapter_in_parts(adapter: Adapter | None, sharding: str) -> None:
    """Check that vLLM serves the adapter of a policy in the engine's layout.

    A merged adapter would change the engine's weights, which are also the policy's.

    Raises:
        ValueError: vLLM doesn't serve the adapter.
    """
    if adapter is not None and adapter.why_merged:
        raise ValueError(
            f"sharding is {sharding!r}, but {adapter.why_merged}, and the adapter can't be merged into weights that "
            "policy and engine share: set sharding: gradients, or train an adapter that vLLM serves."
        )


def find_weight_sync(path: str) -> Callable[[torch.nn.Module, Engine, list[Slice]], WeightSync]:
    """Import the user's `WeightSync` class at ``path``.

    Raises:
        ValueError: there is none, or it lacks a method of `WeightSync`.
    """
    sync_class = find_object(path, "weights", lambda value: isinstance(value, type))
    methods = ("publish", "describe", "differing")
    if missing := [name for name in methods if not callable(getattr(sync_class, name, None))]:
        raise ValueError(
            f"weights is {path!r}, which has no {missing[0]}, but must be a class with publish, describe and "
            "differing: see docs/design.md."
        )
    return sync_class


def expects_sharing(config: GRPOConfig, policy: Policy) -> bool:
    """Return whether the policy will share the engine's memory, as far as that is known before both exist."""
    adapter, dtype = policy.adapter, policy.model.dtype
    copied = config.weights == "copied" or is_import_path(config.weights) or (adapter and adapter.why_merged)
    if copied or config.cuts_weights:
        return False
    same_layout = config.vllm_tensor_parallel_size == 1 or config.tensor_parallel
    return engine_dtype(config, dtype) == dtype and same_layout


def serves_packed(config: GRPOConfig, policy: Policy) -> bool:
    """Return whether the engine reads a quantised base in the policy's memory, instead of dequantised copies."""
    return policy.quantization is not None and config.weights == "shared"


def weight_sync(
    wanted: str,
    policy: torch.nn.Module,
    engine: Engine,
    *,
    untouched: bool,
    device: torch.device,
    adapter: Adapter | None = None,
    cut: str = "",
    seen: ModelInput | None = None,
) -> WeightSync:
    """Move the policy to ``device``, into the engine's memory where possible, and plan its publishing.

    The device never has two copies of shared weights.

    Args:
        wanted: ``auto``, ``shared``, ``copied``, ``gathered``, ``adapter`` or the import path of a `WeightSync` class.
            For a LoRA policy, ``shared`` means its base.
        policy: the policy.
        engine: the engine.
        untouched: the policy has exactly the values that the engine loaded, so that equal values prove the mapping.
        device: the policy's final device.
        adapter: the adapter that the policy trains instead of its weights.
        cut: ``rows``: each rank will keep only some rows of the weights; ``parts``: the policy is cut here, so that
            each rank has its engine rank's part of every parameter; empty: the policy stays whole.
        seen: a prompt with images, of a model that reads them; it proves the vision tower.

    Raises:
        ValueError: ``wanted`` can't be used, or the policy's shape isn't the checkpoint's.
        RuntimeError: the engine doesn't read a parameter at its expected place, so publishing couldn't update it.
    """
    rows = policy.get_input_embeddings().weight.shape[0]
    if rows != engine.vocab_size:
        raise ValueError(
            f"The model has {rows:,} embeddings, but the checkpoint that vLLM loaded has {engine.vocab_size:,}: save "
            "the resized model with save_pretrained and pass its folder as the model."
        )
    layout = engine.layout
    with on_all_ranks("the map of the weights"):
        served = engine.served.weights
        place, ranks = layout.engine_place, layout.ranks_per_engine
        slices = map_parameters(policy, engine.tensors, place, ranks, served)
        if not engine.blank:
            slices = with_row_orders(slices, policy, place, ranks)
    equal = untouched and not engine.blank and engine.dtype == policy.dtype
    if equal:
        proof.check_equal(slices)
    packed = [part for part in slices if part.packed is not None]
    if packed or served:
        _dequantise(slices if engine.blank else packed, policy, engine, device, seen)
    sides = Sides(policy, engine, slices, device, equal and not packed, seen)
    sync = _in_parts(sides, adapter) if cut == "parts" else _select(wanted, sides, adapter, cut == "rows")
    if sides.equal:
        proof.check_same(policy, engine)  # equal weights don't prove that both compute the same architecture
    return sync


def _select(wanted: str, sides: Sides, adapter: Adapter | None, cut: bool) -> WeightSync:
    with_slots = check_choice(wanted, adapter, cut)
    if is_import_path(wanted):
        return _custom(wanted, sides)
    if cut:
        return _gathered(sides)
    if adapter is None:
        return _whole(wanted, sides)
    if with_slots is None:
        return _merged(sides, adapter.why_merged or "as configured")
    try:
        return _adapter(wanted, sides)
    except Unserved as unserved:
        if wanted != "auto":
            raise ValueError(f"weights is {wanted!r}, but {unserved}: set weights: auto (merged copies).") from None
        return _merged(sides, str(unserved))


def _dequantise(
    slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine, device: torch.device, seen: ModelInput | None
) -> None:
    """Write a quantised base into the engine, and check that engine and policy have the same output.

    Raises:
        RuntimeError: the outputs differ, or the engine doesn't use some of the policy's packed weights.
    """
    _move(policy, device)
    Copies(slices).write()
    proof.check_same(policy, engine, seen)
    untested = [weight for name, weight in packed_weights(policy).items() if seen is None and sees(name)]
    if unused := engine.served.unused(untested):
        raise RuntimeError(
            f"{unused} of the engine's layers don't use the policy's packed weights: this architecture isn't known "
            "yet. Set weights: auto."
        )


def _custom(path: str, sides: Sides) -> WeightSync:
    """Prove the mapping and create the user's `WeightSync`."""
    _move(sides.policy, sides.device)
    proof.check_read(sides.slices, sides.policy, sides.engine, seen=sides.seen)
    return find_weight_sync(path)(sides.policy, sides.engine, sides.slices)


def _gathered(sides: Sides) -> GatheredWeights:
    """Create `GatheredWeights`. Until the policy is cut it is in the engine's memory if possible, so that the device
    never has two copies."""
    if not any(shared.obstacle(part) for part in sides.slices):
        shared.bind(sides.slices)
        _move(sides.policy, sides.device)  # its buffers
    proof.check_read(sides.slices, sides.policy, sides.engine, seen=sides.seen)
    return GatheredWeights(sides.policy, sides.engine, sides.slices)


def _in_parts(sides: Sides, adapter: Adapter | None) -> WeightSync:
    """Prove the mapping while the policy is whole, then make every parameter the tensor of the engine's rank.

    An adapter is cut as its base is, because vLLM cuts it in its slots in that way.

    Raises:
        ValueError: a parameter can't share the engine's memory, or the engine has no slot for an adapted layer.
        RuntimeError: in parts, the policy's output differs from the engine's.
    """
    policy, engine = sides.policy, sides.engine
    with on_all_ranks("the plan of the policy's parts"):
        parts = shared.parts(sides.slices)
    proof.check_read(sides.slices, policy, engine, seen=sides.seen)
    shared.bind_parts(parts)
    shards, lora_shards = {part.name: shard for part, shard in parts}, dict[int, Shard]()
    if adapter is not None:
        lora_shards = adapter_shards(adapted_layers(policy), {str(base_name(name)): s for name, s in shards.items()})
        for name, parameter in policy.named_parameters():
            if (shard := lora_shards.get(id(parameter))) is not None:
                parameter.data, shards[name] = shard.of(parameter.detach()).clone(), shard
    _move(policy, sides.device)  # the adapter, and buffers
    split(policy, shards, engine.layout)
    sync: WeightSync = (base := SharedWeights(policy, engine, [part for part, _ in parts]))
    if adapter is not None:
        try:
            sync = AdapterWeights(policy, engine, map_adapter(policy, engine, lora_shards), base)
        except Unserved as unserved:
            raise ValueError(f"sharding is 'tensor', but {unserved}: set sharding: gradients.") from None
    if not sides.equal:
        proof.check_same(policy, engine)
    return sync


def _whole(wanted: str, sides: Sides, constant: bool = False) -> CopiedWeights:
    """Create `SharedWeights` or `CopiedWeights` for a policy's weights, or for a LoRA policy's base.

    Args:
        wanted: ``auto``, ``shared`` or ``copied``.
        sides: policy and engine.
        constant: the weights are equal and never change. Then it doesn't matter where the engine reads them.
    """
    obstacles = {part.name: reason for part in sides.slices if (reason := shared.obstacle(part))}
    if wanted == "shared" and obstacles:
        name, reason = next(iter(obstacles.items()))
        raise ValueError(
            f"weights is 'shared', but {len(obstacles)} of {len(sides.slices)} parameters can't be shared ({name}: "
            f"{reason}): set weights: auto, or the same dtype for policy and engine."
        )
    split = sides.engine.layout.ranks_per_engine > 1
    if wanted != "copied" and len(obstacles) < len(sides.slices) and not split:
        return _shared(sides, obstacles, constant)
    _move(sides.policy, sides.device)
    if not constant:
        proof.check_read(sides.slices, sides.policy, sides.engine, seen=sides.seen)
    why = "as configured" if wanted == "copied" else next(iter(obstacles.values()), "")
    if split:
        why = f"each of the engine's {sides.engine.layout.ranks_per_engine} ranks has a part, the policy is whole"
    return CopiedWeights(sides.policy, sides.engine, sides.slices, why)


def _shared(sides: Sides, obstacles: Mapping[str, str], constant: bool) -> SharedWeights:
    """Create `SharedWeights` that copy the parameters with ``obstacles`` (reasons by name) and share all others."""
    views = [part for part in sides.slices if part.name not in obstacles]
    copies = [(part, obstacles[part.name]) for part in sides.slices if part.name in obstacles]
    shared.bind(views)
    _move(sides.policy, sides.device)  # moves the rest: buffers, and the parameters that are copied
    tested = [*views, *(part for part, _ in copies if part.packed is not None)]
    for part in [] if constant else proof.check_read(tested, sides.policy, sides.engine, sides.slices, seen=sides.seen):
        if part.packed is not None:
            continue
        part.source.data = part.destination.clone()  # separate memory again, with the same value
        views.remove(part)
        copies.append((part, "no output depends on it, so that sharing it can't be proved"))
    return SharedWeights(sides.policy, sides.engine, views, copies)


def _adapter(wanted: str, sides: Sides) -> AdapterWeights:
    """Create `AdapterWeights` on a base that is shared or, if that is impossible and not required, copied once."""
    adapted = {layer.parameter for layer in adapted_layers(sides.policy)}
    if reordered := [part.name for part in sides.slices if part.rows is not None and base_name(part.name) in adapted]:
        raise Unserved(f"vLLM has the rows of {len(reordered)} adapted layers in another order ({reordered[0]})")
    if copied := [part.name for part in sides.slices if part.is_copy and base_name(part.name) in adapted]:
        raise Unserved(f"vLLM has {len(copied)} adapted layers twice, but adds an adapter once ({copied[0]})")
    slots = map_adapter(sides.policy, sides.engine)
    base = _whole("shared" if wanted == "shared" else "auto", sides, constant=sides.equal)
    return AdapterWeights(sides.policy, sides.engine, slots, base)


def _merged(sides: Sides, why: str) -> MergedWeights:
    _move(sides.policy, sides.device)
    merged = MergedWeights(sides.policy, sides.engine, sides.slices, why)
    moving = merged.moving if sides.equal else sides.slices
    proof.check_read(moving, sides.policy, sides.engine, sides.slices, seen=sides.seen)
    return merged

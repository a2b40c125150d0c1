"""Selects a run's `WeightSync`, proves it, and says which and why: one function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..batch import ModelInput
from ..config import GRPOConfig
from ..engine.arguments import engine_dtype
from ..engine.protocol import Engine
from ..parallel.ranks import on_all_ranks
from ..parallel.shards import Shard
from ..policy.images import sees
from ..policy.loading import Policy
from ..policy.lora import Adapter, adapted_layers, base_name
from ..policy.quantized_layers import packed_weights
from ..policy.tensor_parallel import adapter_shards, split
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
    slices: list[Slice]  # every parameter of the policy (with LoRA of its base) and its place in the engine
    device: torch.device  # where the policy shall be
    equal: bool  # every slice was found to hold its parameter's value, as both sides loaded one checkpoint
    seen: ModelInput | None = None  # a prompt with images


def _move(policy: torch.nn.Module, device: torch.device) -> None:
    if any(tensor.device.type != device.type for tensor in [*policy.parameters(), *policy.buffers()]):
        policy.to(device)  # only then: `.to("cpu:0")` copies tensors on "cpu", and would undo the sharing


def check_choice(wanted: str, adapter: Adapter | None, cut: bool = False) -> Adapter | None:
    """The adapter that the engine is to have slots for; None: there is none, or it is merged on its way. With ``cut`` a
    rank will hold a part of the policy's weights only.

    Raises:
        ValueError: what ``weights`` forces can't be had.
    """
    if cut and adapter is not None:
        raise ValueError(
            "sharding is 'fsdp', but the policy trains a LoRA adapter, whose frozen base is in the engine's memory "
            "anyway: set sharding: gradients, which cuts the adapter's gradients and optimizer state."
        )
    if cut and wanted not in ("auto", "gathered"):
        raise ValueError(
            f"weights is {wanted!r} and sharding is 'fsdp', but no rank holds weights whole that the engine could read "
            "or that could be copied: set weights: auto (they are gathered), or sharding: gradients, which leaves them "
            "whole."
        )
    if wanted == "gathered" and not cut:
        raise ValueError(
            "weights is 'gathered', but each rank holds the whole policy, and there is nothing to gather: set weights: "
            "auto, or sharding: fsdp on several ranks."
        )
    if is_import_path(wanted):
        find_weight_sync(wanted)
        if adapter is not None:
            raise ValueError(
                f"weights is {wanted!r}, but the policy trains a LoRA adapter, and a way of your own gets whole "
                "weights: set use_peft: false (or give no peft_config), or set weights: auto."
            )
    if wanted == "adapter" and adapter is None:
        raise ValueError(
            "weights is 'adapter', but the policy is trained whole: set use_peft: true (or give peft_config), or set "
            "weights: auto."
        )
    if adapter is None or wanted == "copied":
        return None
    if wanted != "auto" and adapter.why_merged:
        raise ValueError(f"weights is {wanted!r}, but {adapter.why_merged}: set weights: auto (merged copies).")
    return None if adapter.why_merged else adapter


def check_adapter_in_parts(adapter: Adapter | None, sharding: str) -> None:
    """Raise a ValueError if a policy in the engine's layout would have an adapter that the engine can't have beside its
    weights: merged ones aren't the policy's."""
    if adapter is not None and adapter.why_merged:
        raise ValueError(
            f"sharding is {sharding!r}, but {adapter.why_merged}, so that the engine's weights would have to be merged "
            "ones, and not the policy's: set sharding: gradients, or train an adapter that vLLM serves."
        )


def find_weight_sync(path: str) -> Callable[[torch.nn.Module, Engine, list[Slice]], WeightSync]:
    """The user's `WeightSync` at ``path``.

    Raises:
        ValueError: there is none, or it lacks a method of `WeightSync`.
    """
    kind = find_object(path, "weights", lambda value: isinstance(value, type))
    if missing := [name for name in ("publish", "describe", "differing") if not callable(getattr(kind, name, None))]:
        raise ValueError(
            f"weights is {path!r}, which has no {missing[0]}, but must be a class with publish, describe and "
            "differing: see docs/weights.md."
        )
    return kind


def expects_sharing(config: GRPOConfig, policy: Policy) -> bool:
    """Whether the policy will share the engine's memory, as far as can be known before both are there."""
    adapter, dtype = policy.adapter, policy.model.dtype
    copied = config.weights == "copied" or is_import_path(config.weights) or (adapter and adapter.why_merged)
    if copied or config.cuts_weights:
        return False
    same_layout = config.vllm_tensor_parallel_size == 1 or config.tensor_parallel
    return engine_dtype(config, dtype) == dtype and same_layout


def serves_packed(config: GRPOConfig, policy: Policy) -> bool:
    """Whether the engine is to read a quantised base where the policy has it, rather than dequantised copies."""
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
    """Bring the policy to ``device``, in the engine's memory where that can be, and plan how the engine follows it. The
    device never holds two copies of what is shared.

    Args:
        wanted: ``auto``, ``shared``, ``copied``, ``gathered``, ``adapter`` or the import path of a class (a
            `WeightSync`). Of a LoRA policy, ``shared`` speaks of its base.
        untouched: the policy holds just what the engine loaded, so that equal values prove the mapping.
        adapter: what the policy trains in place of its weights.
        cut: ``rows``: a rank will hold some rows of the weights only, once this is done; ``parts``: the policy becomes
            what its engine's ranks hold, each its part of every parameter; empty: it stays whole.
        seen: a prompt with images, of a model that reads them: what sees is proved on it.

    Raises:
        ValueError: what is forced can't be had; or the policy isn't the checkpoint's shape.
        RuntimeError: the engine doesn't read a parameter where it should be: publishing couldn't reach it.
    """
    rows = policy.get_input_embeddings().weight.shape[0]
    if rows != engine.vocab_size:
        raise ValueError(
            f"The model has {rows:,} embeddings, but the checkpoint that vLLM loaded has {engine.vocab_size:,}: save "
            "the resized model with save_pretrained and give its folder."
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
    found = _in_parts(sides, adapter) if cut == "parts" else _chosen(wanted, sides, adapter, cut == "rows")
    if sides.equal:
        proof.check_same(policy, engine)  # the architecture, too, is one for both
    return found


def _chosen(wanted: str, sides: Sides, adapter: Adapter | None, cut: bool) -> WeightSync:
    with_slots = check_choice(wanted, adapter, cut)
    if is_import_path(wanted):
        return _own(wanted, sides)
    if cut:
        return _gathered(sides)
    if adapter is None:
        return _whole(wanted, sides)
    if with_slots is None:
        return _merged(sides, adapter.why_merged or "as asked")
    try:
        return _adapter(wanted, sides)
    except Unserved as unserved:
        if wanted != "auto":
            raise ValueError(f"weights is {wanted!r}, but {unserved}: set weights: auto (merged copies).") from None
        return _merged(sides, str(unserved))


def _dequantise(
    slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine, device: torch.device, seen: ModelInput | None
) -> None:
    """Write a quantised base into the engine, which then is shown to say what the policy does.

    Raises:
        RuntimeError: it doesn't, or doesn't use some of the packed weights that it was given.
    """
    _move(policy, device)
    Copies(slices).write()
    proof.check_same(policy, engine, seen)
    blind = [weight for name, weight in packed_weights(policy).items() if seen is None and sees(name)]
    if unused := engine.served.unused(blind):
        raise RuntimeError(
            f"{unused} of the engine's layers that should multiply with the policy's packed weights did "
            "nothing: this architecture isn't known yet. Set weights: auto."
        )


def _own(path: str, sides: Sides) -> WeightSync:
    _move(sides.policy, sides.device)
    proof.check_read(sides.slices, sides.policy, sides.engine, seen=sides.seen)
    return find_weight_sync(path)(sides.policy, sides.engine, sides.slices)


def _gathered(sides: Sides) -> GatheredWeights:
    """Until it is cut, the policy lies in the engine's memory where it can: the device never holds it twice."""
    if not any(shared.obstacle(part) for part in sides.slices):
        shared.bind(sides.slices)
        _move(sides.policy, sides.device)  # its buffers
    proof.check_read(sides.slices, sides.policy, sides.engine, seen=sides.seen)
    return GatheredWeights(sides.policy, sides.engine, sides.slices)


def _in_parts(sides: Sides, adapter: Adapter | None) -> WeightSync:
    """Proved while the policy is whole; then every parameter becomes the tensor of the engine's rank. An adapter is cut
    as its base is, which is how vLLM cuts it in its slots.

    Raises:
        ValueError: one can't, or the engine has no slot for an adapted layer.
        RuntimeError: in parts the policy says something else than the engine.
    """
    policy, engine = sides.policy, sides.engine
    with on_all_ranks("the plan of the policy's parts"):
        parts = shared.parts(sides.slices)
    proof.check_read(sides.slices, policy, engine, seen=sides.seen)
    shared.bind_parts(parts)
    shards, of_adapter = {part.name: shard for part, shard in parts}, dict[int, Shard]()
    if adapter is not None:
        of_adapter = adapter_shards(adapted_layers(policy), {str(base_name(name)): s for name, s in shards.items()})
        for name, parameter in policy.named_parameters():
            if (shard := of_adapter.get(id(parameter))) is not None:
                parameter.data, shards[name] = shard.of(parameter.detach()).clone(), shard
    _move(policy, sides.device)  # the adapter, and buffers
    split(policy, shards, engine.layout)
    found: WeightSync = (base := SharedWeights(policy, engine, [part for part, _ in parts]))
    if adapter is not None:
        try:
            found = AdapterWeights(policy, engine, map_adapter(policy, engine, of_adapter), base)
        except Unserved as unserved:
            raise ValueError(
                f"sharding: tensor can't be had for this adapter ({unserved}): set sharding: gradients."
            ) from None
    if not sides.equal:
        proof.check_same(policy, engine)
    return found


def _whole(wanted: str, sides: Sides, constant: bool = False) -> CopiedWeights:
    """Shared or copied: a policy's own weights, or a LoRA's base. ``constant``: equal now and for good, which is proof
    enough, wherever the engine reads them from."""
    obstacles = {part.name: reason for part in sides.slices if (reason := shared.obstacle(part))}
    if wanted == "shared" and obstacles:
        name, reason = next(iter(obstacles.items()))
        raise ValueError(
            f"weights: shared can't be had for {len(obstacles)} of {len(sides.slices)} parameters ({name}: {reason}): "
            "set weights: auto, or give policy and engine the same dtype."
        )
    split = sides.engine.layout.ranks_per_engine > 1
    if wanted != "copied" and len(obstacles) < len(sides.slices) and not split:
        return _shared(sides, obstacles, constant)
    _move(sides.policy, sides.device)
    if not constant:
        proof.check_read(sides.slices, sides.policy, sides.engine, seen=sides.seen)
    why = "as asked" if wanted == "copied" else next(iter(obstacles.values()), "")
    if split:
        why = f"each of the engine's {sides.engine.layout.ranks_per_engine} ranks has a part, the policy is whole"
    return CopiedWeights(sides.policy, sides.engine, sides.slices, why)


def _shared(sides: Sides, obstacles: Mapping[str, str], constant: bool) -> SharedWeights:
    """Shared but for the parameters that ``obstacles`` names, which are copied."""
    able = [part for part in sides.slices if part.name not in obstacles]
    rest = [(part, obstacles[part.name]) for part in sides.slices if part.name in obstacles]
    shared.bind(able)
    _move(sides.policy, sides.device)  # what isn't bound: buffers, and the parameters that are copied
    proved = [*able, *(part for part, _ in rest if part.packed is not None)]
    for part in [] if constant else proof.check_read(proved, sides.policy, sides.engine, sides.slices, seen=sides.seen):
        if part.packed is not None:
            continue
        part.source.data = part.destination.clone()  # memory of its own again, with the same value
        able.remove(part)
        rest.append((part, "no output depends on it, so that sharing it can't be proved"))
    return SharedWeights(sides.policy, sides.engine, able, rest)


def _adapter(wanted: str, sides: Sides) -> AdapterWeights:
    """LoRA in the engine's slots, on a base that is shared or, where that can't be and isn't forced, copied once."""
    adapted = {layer.parameter for layer in adapted_layers(sides.policy)}
    if other := [part.name for part in sides.slices if part.rows is not None and base_name(part.name) in adapted]:
        raise Unserved(f"vLLM has the rows of {len(other)} adapted layers in another order ({other[0]})")
    if twice := [part.name for part in sides.slices if part.is_copy and base_name(part.name) in adapted]:
        raise Unserved(f"vLLM has {len(twice)} adapted layers twice, and an adapter once ({twice[0]})")
    slots = map_adapter(sides.policy, sides.engine)
    base = _whole("shared" if wanted == "shared" else "auto", sides, constant=sides.equal)
    return AdapterWeights(sides.policy, sides.engine, slots, base)


def _merged(sides: Sides, why: str) -> MergedWeights:
    _move(sides.policy, sides.device)
    merged = MergedWeights(sides.policy, sides.engine, sides.slices, why)
    moving = merged.moving if sides.equal else sides.slices
    proof.check_read(moving, sides.policy, sides.engine, sides.slices, seen=sides.seen)
    return merged

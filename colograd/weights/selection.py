"""Choose how the engine gets the policy's weights (a `WeightSync`), and check that the engine uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..batch import ModelInput
from ..config import GRPOConfig
from ..engine.arguments import engine_dtype
from ..engine.protocol import Engine
from ..parallel.ranks import on_all_ranks
from ..policy.loading import Policy
from ..policy.lora import Adapter, adapted_layers, packed_weights
from ..policy.towers import sees
from ..runtime.importing import find_object, is_import_path
from ..runtime.registry import hooks
from . import proof
from .mapping import Slice, map_parameters, with_row_orders
from .sync import CopiedWeights, MergedWeights, SharedWeights, Unserved, WeightSync, bind, copy, obstacle


@dataclass(frozen=True, slots=True)
class Pairing:
    """The policy, the engine and the map of weights between them, before a `WeightSync` is chosen."""

    policy: torch.nn.Module
    engine: Engine
    slices: list[Slice]
    device: torch.device  # The device that the policy will be moved to.
    equal: bool  # Whether `proof.check_equal` compared all values of engine and policy, none of them quantised.
    tower_prompt: ModelInput | None = None  # A prompt with images that tests the vision tower.

    def unread(self, slices: Sequence[Slice] | None = None) -> list[Slice]:
        """Run `proof.check_read` for ``slices`` (default: all). Return the slices that the engine doesn't read."""
        chosen = self.slices if slices is None else slices
        return proof.check_read(chosen, self.policy, self.engine, self.slices, self.tower_prompt)


def move(policy: torch.nn.Module, device: torch.device) -> None:
    # `.to("cpu:0")` would copy tensors that are on "cpu", and end sharing.
    if any(tensor.device.type != device.type for tensor in [*policy.parameters(), *policy.buffers()]):
        policy.to(device)


def check_choice(wanted: str, adapter: Adapter | None, cut: bool = False) -> Adapter | None:
    """Check the setting `weights` (``wanted``). Return the adapter if the engine needs LoRA slots for it, else None.
    ``cut``: whether each rank holds only a part of the policy's weights (``sharding: fsdp``)."""
    if cut and adapter is not None:
        raise ValueError(
            "`sharding` is 'fsdp', but the policy trains a LoRA adapter, and fsdp doesn't divide a model with an "
            "adapter: set `sharding: gradients`, which divides the adapter's gradients and optimizer state over ranks."
        )
    if cut and wanted not in ("auto", "gathered"):
        raise ValueError(
            f"`weights` is {wanted!r} and `sharding` is 'fsdp', but with fsdp no rank holds whole weights to share or "
            "copy: set `weights: auto`, which gathers weights from the ranks, or `sharding: gradients`, which doesn't "
            "cut weights."
        )
    if wanted == "gathered" and not cut:
        raise ValueError(
            "`weights` is 'gathered', but each rank holds the whole policy: set `weights: auto`, or `sharding: fsdp` "
            "on several ranks."
        )
    if is_import_path(wanted):
        find_weight_sync(wanted)
        if adapter is not None:
            raise ValueError(
                f"`weights` is {wanted!r}, but the policy trains a LoRA adapter, and your own class publishes whole "
                "weights: set `use_peft: false` (or remove `peft_config`), or set `weights: auto`."
            )
    if wanted == "adapter" and adapter is None:
        raise ValueError(
            "`weights` is 'adapter', but the policy is trained without a LoRA adapter: set `use_peft: true` (or pass "
            "`peft_config`), or set `weights: auto`."
        )
    if adapter is None or wanted == "copied":
        return None
    if wanted != "auto" and adapter.why_merged:
        raise ValueError(f"`weights` is {wanted!r}, but {adapter.why_merged}: set `weights: auto` to merge the LoRA.")
    return None if adapter.why_merged else adapter


def find_weight_sync(path: str) -> Callable[[torch.nn.Module, Engine, list[Slice]], WeightSync]:
    sync_class = find_object(path, "weights", lambda value: isinstance(value, type))
    methods = ("publish", "describe", "differing")
    if missing := [name for name in methods if not callable(getattr(sync_class, name, None))]:
        raise ValueError(
            f"`weights` is {path!r}, a class without the method `{missing[0]}`: a weight sync must have the methods "
            "`publish`, `describe` and `differing`, see docs/design.md."
        )
    return sync_class


def expects_sharing(config: GRPOConfig, policy: Policy) -> bool:
    """Return whether the policy will share the engine's memory, estimated before the engine exists."""
    adapter, dtype = policy.adapter, policy.model.dtype
    copied = config.weights == "copied" or is_import_path(config.weights) or (adapter and adapter.why_merged)
    if copied or config.cuts_weights:
        return False
    same_layout = config.vllm_tensor_parallel_size == 1 or config.tensor_parallel
    return engine_dtype(config, dtype) == dtype and same_layout


def weight_sync(
    wanted: str, policy: torch.nn.Module, engine: Engine, *, untouched: bool, device: torch.device,
    adapter: Adapter | None = None, cut: str = "", tower_prompt: ModelInput | None = None,
) -> WeightSync:  # fmt: skip
    """Move the policy to ``device``, or into the engine's memory, and return its `WeightSync`. The device never holds
    two copies of shared weights.

    Args:
        untouched: whether the policy has exactly the values of the checkpoint that the engine loaded.
        cut: how ranks divide the policy. "": not at all. "rows": later, each rank will keep some rows of the weights.
            "parts": this function leaves on each rank only the part of a parameter that vLLM has on the same rank.
    """
    rows = policy.get_input_embeddings().weight.shape[0]
    if rows != engine.vocab_size:
        raise ValueError(
            f"The model has {rows:,} rows of embeddings, but the checkpoint that vLLM loaded has "
            f"{engine.vocab_size:,}: save the resized model with save_pretrained and pass its folder as the model."
        )
    layout = engine.layout
    with on_all_ranks("the map of the weights"):
        served = engine.served.weights if engine.served is not None else ()
        place, ranks = layout.engine_place, layout.ranks_per_engine
        slices = map_parameters(policy, engine.tensors, place, ranks, served)
        if not engine.blank:
            slices = with_row_orders(slices, policy, place, ranks)
    equal = untouched and not engine.blank and engine.dtype == policy.dtype
    if equal:
        proof.check_equal(slices)
    packed = [part for part in slices if part.packed is not None]
    if packed or served:  # a quantised base is compared by outputs, because its values differ from the checkpoint's
        move(policy, device)
        copy(slices if engine.blank else packed)
        proof.check_same(policy, engine, tower_prompt)
        untested = [weight for name, weight in packed_weights(policy).items() if tower_prompt is None and sees(name)]
        if engine.served is not None and (unused := engine.served.unused(untested)):
            raise RuntimeError(
                f"`weights` is 'shared', but {unused} of the engine's layers don't use the policy's quantised weights: "
                "Colograd doesn't know this architecture yet. Set `weights: auto` to copy the weights."
            )
    pairing = Pairing(policy, engine, slices, device, equal and not packed, tower_prompt)
    if cut == "parts":  # an extension cuts the policy, and returns the sync
        (in_parts,) = hooks("weights_in_parts")
        sync: WeightSync = in_parts(pairing, adapter)
    else:
        sync = _select(wanted, pairing, adapter, cut == "rows")
    if pairing.equal:
        proof.check_same(policy, engine)  # vLLM may compute differently with equal weights
    return sync


def _select(wanted: str, pairing: Pairing, adapter: Adapter | None, cut: bool) -> WeightSync:
    policy, engine = pairing.policy, pairing.engine
    if is_import_path(wanted):
        move(policy, pairing.device)
        pairing.unread()
        return find_weight_sync(wanted)(policy, engine, pairing.slices)
    if cut:
        (gathered_weights,) = hooks("gathered_weights")
        return gathered_weights(pairing)
    if adapter is None:
        return _whole(wanted, pairing)
    why_merged = adapter.why_merged or "as configured"
    if wanted != "copied" and not adapter.why_merged:
        try:
            return _adapter(wanted, pairing)
        except Unserved as unserved:
            if wanted != "auto":
                raise ValueError(
                    f"`weights` is {wanted!r}, but {unserved}: set `weights: auto` to merge the adapter into a copy."
                ) from None
            why_merged = str(unserved)
    move(policy, pairing.device)
    merged = MergedWeights(policy, engine, pairing.slices, why_merged)
    pairing.unread(merged.moving if pairing.equal else None)
    return merged


def _whole(wanted: str, pairing: Pairing, constant: bool = False) -> CopiedWeights:
    """Create the weight sync of a policy, or of a LoRA policy's base. ``constant``: whether the engine has these
    weights already and they never change. Then skip the test that the engine reads them."""
    obstacles = {part.name: reason for part in pairing.slices if (reason := obstacle(part))}
    if wanted == "shared" and obstacles:
        name, reason = next(iter(obstacles.items()))
        raise ValueError(
            f"`weights` is 'shared', but {len(obstacles)} of {len(pairing.slices)} parameters can't be shared ({name}: "
            f"{reason}): set `weights: auto`, or remove `dtype` from `vllm_engine_kwargs` if it is the cause."
        )
    policy, engine, ranks = pairing.policy, pairing.engine, pairing.engine.layout.ranks_per_engine
    if wanted == "copied" or len(obstacles) == len(pairing.slices) or ranks > 1:
        move(policy, pairing.device)
        if not constant:
            pairing.unread()
        why = "as configured" if wanted == "copied" else next(iter(obstacles.values()), "")
        if ranks > 1:
            why = f"each of the engine's {ranks} ranks has a part, the policy is whole"
        return CopiedWeights(policy, engine, pairing.slices, why)
    views = [part for part in pairing.slices if part.name not in obstacles]
    copies = [(part, obstacles[part.name]) for part in pairing.slices if part.name in obstacles]
    bind(views)
    move(policy, pairing.device)
    packed = [part for part, _ in copies if part.packed is not None]
    for part in [] if constant else pairing.unread([*views, *packed]):
        if part.packed is None:
            part.source.data = part.destination.clone()  # the parameter gets separate memory with its value
            views.remove(part)
            copies.append((part, "no output depends on it, so that sharing it can't be proved"))
    return SharedWeights(policy, engine, views, copies)


def _adapter(wanted: str, pairing: Pairing) -> WeightSync:
    adapted = {layer.parameter for layer in adapted_layers(pairing.policy)}
    if reordered := [part.name for part in pairing.slices if part.rows is not None and part.plain_name in adapted]:
        raise Unserved(f"vLLM reorders the rows of {len(reordered)} layers with a LoRA adapter ({reordered[0]})")
    whole_copies = [part for part in pairing.slices if part.again and part.destination.shape == part.source.shape]
    if copied := [part.name for part in whole_copies if part.plain_name in adapted]:
        raise Unserved(f"vLLM adds an adapter to only one of its two copies of {len(copied)} layers ({copied[0]})")
    (map_adapter,), (adapter_weights,) = hooks("map_adapter"), hooks("adapter_weights")
    slots = map_adapter(pairing.policy, pairing.engine)
    base = _whole("shared" if wanted == "shared" else "auto", pairing, constant=pairing.equal)
    sync: WeightSync = adapter_weights(pairing.policy, pairing.engine, slots, base)
    return sync

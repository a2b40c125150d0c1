"""Picks the way of publishing for a run, proves it, and says which and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..config import GRPOConfig
from ..engine.arguments import engine_dtype
from ..engine.vllm_engine import Engine
from ..policy.loading import Policy
from ..policy.lora import Adapter
from . import proof, shared
from .adapter import AdapterWeights, Unserved, map_adapter
from .copied import CopiedWeights
from .mapping import Slice, map_parameters
from .merged import MergedWeights
from .shared import SharedWeights


class Publisher(Protocol):
    """A way of publishing."""

    def publish(self, version: int) -> int: ...

    def describe(self) -> str: ...

    def differing(self) -> list[str]: ...


def check_choice(wanted: str, adapter: Adapter | None) -> Adapter | None:
    """The adapter that the engine is to have slots for; None: there is none, or it is merged on its way.

    Raises:
        ValueError: what ``weights`` forces can't be had.
    """
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


def expects_sharing(config: GRPOConfig, policy: Policy) -> bool:
    """Whether the policy will be found able to share the engine's memory, as far as that can be said before both are
    loaded: for the plan of that memory."""
    adapter, dtype = policy.adapter, policy.model.dtype
    return (
        config.weights != "copied"
        and not (adapter and adapter.why_merged)
        and engine_dtype(config, dtype) == dtype
        and config.vllm_tensor_parallel_size == 1
    )


def publisher(
    wanted: str,
    policy: torch.nn.Module,
    engine: Engine,
    *,
    untouched: bool,
    device: torch.device,
    adapter: Adapter | None = None,
) -> Publisher:
    """Bring the policy to ``device``, in the engine's memory where that can be, and plan how the engine follows it.

    The policy comes on the CPU or wherever the user put it; the accelerator never holds two copies of what is shared.

    Args:
        wanted: ``auto``, ``shared``, ``copied`` or ``adapter``. Of a LoRA policy, ``shared`` speaks of its base.
        untouched: the policy holds just what the engine loaded, so that equal values prove the mapping.
        adapter: what the policy trains in place of its weights.

    Raises:
        ValueError: what is forced can't be had; or the policy isn't the checkpoint's shape.
        RuntimeError: the engine doesn't read a parameter where it should be: publishing couldn't reach it.
    """
    _check_vocabulary(policy, engine)
    slices = map_parameters(policy, engine.model)
    equal = untouched and engine.dtype == next(policy.parameters()).dtype
    if equal:
        proof.check_equal(slices)
    if adapter is None:
        return _whole(wanted, policy, engine, slices, device)
    # A base that both loaded and nobody changes is right wherever the engine reads it from: equality is proof enough.
    why = adapter.why_merged or "as asked"
    if check_choice(wanted, adapter) is not None:
        try:
            map_adapter(policy, engine)
            base = _whole("shared" if wanted == "shared" else "auto", policy, engine, slices, device, constant=equal)
            return AdapterWeights(policy, engine, base)
        except Unserved as unserved:
            if wanted != "auto":
                raise ValueError(f"weights is {wanted!r}, but {unserved}: set weights: auto (merged copies).") from None
            why = str(unserved)
    _place(policy, device)
    merged = MergedWeights(policy, engine, slices, why)
    _unproved(merged.moving if equal else slices, policy, engine)
    return merged


def _whole(
    wanted: str,
    policy: torch.nn.Module,
    engine: Engine,
    slices: Sequence[Slice],
    device: torch.device,
    constant: bool = False,
) -> SharedWeights | CopiedWeights:
    """The publisher of a policy's own weights, or of a LoRA's base (``constant``: equal now and for good)."""
    reasons = [(part, shared.obstacle(part)) for part in slices]
    able = [part for part, reason in reasons if not reason]
    rest = [(part, reason) for part, reason in reasons if reason]
    if wanted == "shared" and rest:
        part, reason = rest[0]
        raise ValueError(
            f"weights: shared can't be had for {len(rest)} of {len(slices)} parameters ({part.name}: {reason}): set "
            "weights: auto, or give policy and engine the same dtype."
        )
    if wanted == "copied" or not able:
        _place(policy, device)
        why = "as asked" if wanted == "copied" else rest[0][1]
        if not constant:
            _unproved(slices, policy, engine)
        return CopiedWeights(policy, engine, slices, why)
    shared.bind(able)
    _place(policy, device)  # what isn't bound: buffers, and the parameters that are copied
    for part in [] if constant else _unproved(able, policy, engine):
        shared.unbind(part)
        able.remove(part)
        rest.append((part, "no output depends on it, so that sharing it can't be proved"))
    return SharedWeights(policy, engine, able, rest)


def _place(policy: torch.nn.Module, device: torch.device) -> None:
    """Move what isn't there yet."""
    tensors = [*policy.parameters(), *policy.buffers()]
    if any(tensor.device.type != device.type for tensor in tensors):
        policy.to(device)  # only then: `.to("cpu:0")` copies tensors that are on "cpu", and would undo the sharing


def _unproved(slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine) -> list[Slice]:
    """Those that neither the engine's nor the policy's output depends on.

    Raises:
        RuntimeError: the policy's output depends on a parameter, and the engine's doesn't.
    """
    unread = proof.unread(slices, engine)
    elsewhere = [part for part in unread if not proof.inert(part, policy, engine)]
    if elsewhere:
        raise RuntimeError(
            f"The engine's output doesn't depend on {len(elsewhere)} of {len(slices)} parameters at the place where "
            f"vLLM keeps them ({', '.join(part.name for part in elsewhere[:3])}): it samples from copies of its own, "
            "which publishing can't reach. Leave quantization and custom kernels out of vllm_engine_kwargs; if they "
            "are, this architecture isn't known yet."
        )
    return unread


def _check_vocabulary(policy: torch.nn.Module, engine: Engine) -> None:
    rows = policy.get_input_embeddings().weight.shape[0]
    if rows != engine.vocab_size:
        raise ValueError(
            f"The model has {rows:,} embeddings, but the checkpoint that vLLM loaded has {engine.vocab_size:,}: save "
            "the resized model with save_pretrained and give its folder."
        )

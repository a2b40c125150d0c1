"""Liger's Triton kernels in the policy (``use_liger_kernel``): norms, rotary embedding and activation, on a GPU.

liger-kernel puts forwards of its own into the modules of a loaded model, whose parameters stay the objects that they
are. What it exchanges in the architecture's module, for all models in the process, comes back when the trainer closes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import GRPOConfig
from ..config.policy import LIGER_LOSSES
from .attention import autocast_dtype
from .logprobs import evaluation_mode
from .lora import unwrap
from .row_proof import allowed, own_sample_logprobs


def check_liger(config: GRPOConfig) -> None:
    """Raise a ValueError if there is no GPU, or no liger-kernel."""
    if not config.use_liger_kernel:
        return
    if config.on_cpu:
        raise ValueError(
            "use_liger_kernel is true, but its kernels are Triton's, for a GPU, and the policy trains on the CPU: set "
            "it to false."
        )
    _kernels()


def _kernels() -> dict[str, Callable[..., None]]:
    """What patches a model, by its type."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            f"use_liger_kernel is true, but liger-kernel can't be imported ({error}): pip install liger-kernel."
        ) from None
    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def apply_liger(model: Any, device: torch.device, given: Any, also: Sequence[Any] = ()) -> Callable[[], None]:
    """Put Liger's kernels into a model (or a PeftModel's) that computes on ``device``, and into ``also``.

    Args:
        given: what its functions are told: `{rope: false}`.

    Returns:
        Gives other models of this architecture its own code again.

    Raises:
        ValueError: none for this model, one that isn't known, or another result than the model's own.
    """
    model = unwrap(model)
    apply = _kernels_of(model, given)
    names = vars(next(sys.modules[kind.__module__] for kind in type(model).__mro__ if "modeling" in kind.__module__))
    undo = functools.partial(names.update, dict(names))
    with evaluation_mode(model):
        before = own_sample_logprobs(model, device)
        apply(model=model)
        error = float((own_sample_logprobs(model, device) - before).abs().mean())
    if not error <= allowed(autocast_dtype(device) or model.dtype):  # NaN too
        undo()
        raise ValueError(
            f"use_liger_kernel is true, but with Liger's kernels the log-probabilities of a {type(model).__name__} "
            f"differ by {error:.2g} nats from its own: set it to false."
        )
    for other in also:
        if unwrap(other) is not model:
            apply(model=unwrap(other))
    return undo


def _kernels_of(model: Any, given: dict[str, bool]) -> Callable[..., None]:
    """What patches such models, told which kernels are wanted."""
    kind = model.config.model_type
    apply = _kernels().get(kind)
    if apply is None:
        raise ValueError(
            f"use_liger_kernel is true, but liger-kernel has none for {kind!r} models: set it to false, or "
            "torch_compile: true instead."
        )
    known = inspect.signature(apply).parameters.keys() - {"model"}
    if unknown := sorted(given.keys() - known - set(LIGER_LOSSES)):
        raise ValueError(
            f"liger_kernel_config names {unknown[0]!r}, but for {kind!r} models there are "
            f"{', '.join(sorted(known - set(LIGER_LOSSES)))}: choose among these."
        )
    return functools.partial(apply, **{name: value for name, value in given.items() if name in known})

"""Liger's Triton kernels in the policy. liger-kernel also replaces classes and functions in the architecture's
Python module. This affects all models of the architecture."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ...config import GRPOConfig
from ...config.conflicts import LIGER_LOSSES
from ...policy.attention import autocast_dtype
from ...policy.logprobs import evaluation_mode
from ...policy.lora import unwrap
from ...policy.row_proof import allowed, own_sample_logprobs
from ...policy.supported import ModelFeature, Wanted


class Liger(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        if wanted.config.use_liger_kernel and wanted.config.on_cpu:
            raise ValueError(
                "use_liger_kernel is true, but Liger's Triton kernels need a GPU, and the policy trains on the CPU: "
                "set use_liger_kernel: false."
            )
        if wanted.config.use_liger_kernel:
            _kernels()


def liger_of(config: GRPOConfig) -> Callable[[Any, Sequence[Any]], Callable[[], None]] | None:
    return functools.partial(apply_liger, config) if config.use_liger_kernel else None


def _kernels() -> dict[str, Callable[..., None]]:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            f"use_liger_kernel is true, but liger-kernel can't be imported ({error}): pip install liger-kernel."
        ) from None
    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def apply_liger(config: GRPOConfig, model: Any, also: Sequence[Any] = ()) -> Callable[[], None]:
    """Put Liger's kernels into ``model`` and into each model of ``also``. Return a function that restores the
    architecture's Python module, but not the models."""
    model, device = unwrap(model), config.device
    given: Any = config.liger_kernel_config
    kind = model.config.model_type
    if (patch := _kernels().get(kind)) is None:
        raise ValueError(
            f"use_liger_kernel is true, but liger-kernel has no kernels for {kind!r} models: set use_liger_kernel: "
            "false, or set torch_compile: true in its place."
        )
    known = inspect.signature(patch).parameters.keys() - {"model"}
    if unknown := sorted(given.keys() - known - set(LIGER_LOSSES)):
        raise ValueError(
            f"liger_kernel_config names {unknown[0]!r}, but for {kind!r} models liger-kernel knows the names "
            f"{', '.join(sorted(known - set(LIGER_LOSSES)))}: choose among these names."
        )
    apply = functools.partial(patch, **{name: value for name, value in given.items() if name in known})
    names = vars(next(sys.modules[kind.__module__] for kind in type(model).__mro__ if "modeling" in kind.__module__))
    undo = functools.partial(names.update, dict(names))
    with evaluation_mode(model):
        before = own_sample_logprobs(model, device)
        apply(model=model)
        error = float((own_sample_logprobs(model, device) - before).abs().mean())
    if not error <= allowed(autocast_dtype(device) or model.dtype):  # A NaN is a failure, too.
        undo()
        raise ValueError(
            f"use_liger_kernel is true, but with Liger's kernels the log-probabilities of a {type(model).__name__} "
            f"differ by {error:.2g} nats from those without Liger: set use_liger_kernel: false."
        )
    for other in also:
        apply(model=unwrap(other))
    return undo

"""Settings of the policy: how the model is loaded, its precision in training, and its kernels."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from .conflicts import check_conflicts
from .knob import knob

# Modes of torch.compile without CUDA graphs: a graph would be recorded for each row length.
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
KEEPS_MASTER = ("adamw_split", "muon")  # Optimizers that keep an exact float32 master copy of a bfloat16 policy.

# One setting's name in TRL, and its name in transformers 5.23 and later.
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")


def default_dtype(optim: str) -> str:
    """Return the policy's default dtype: bfloat16 if ``optim`` keeps a float32 master copy, else float32 as in TRL."""
    return "bfloat16" if optim in ("auto", *KEEPS_MASTER) else "float32"


def resolve_optimizer(optim: str, dtype: torch.dtype | None) -> str:
    by_dtype = "adamw_split" if dtype == torch.bfloat16 else "adamw_torch"
    return by_dtype if optim == "auto" else optim


def checkpointing_way(value: Any) -> bool | str | None:
    if value is None or str(value).lower() == "offload":
        return value if value is None else "offload"
    try:
        return bool(string_to_bool(value))
    except ArgumentTypeError:
        raise ValueError(f"gradient_checkpointing is {value!r}, but must be true, false or offload.") from None


@dataclass
class PolicyKnobs(TrainingArguments):
    """Settings of the policy."""

    model_init_kwargs: dict[str, Any] | str | None = knob(None)
    """Keyword arguments of `from_pretrained`, when the model is given by name."""
    trust_remote_code: bool = knob(False, "Run code that comes with a model.")
    freeze_vision_tower: bool = knob(False, extension="images")
    """Freeze the vision tower of a vision-language model. The projector and the language model are trained; the tower
    is copied to the engine once."""
    disable_dropout: bool = knob(False, "Set every dropout probability to 0.")
    cast_lm_head_to_fp32: bool = knob(False)
    """Compute logits in float32 in policy, reference and vLLM (if its version can), so that sampler and trainer agree
    more closely. The weight keeps its dtype; TRL casts it."""
    router_replay: bool = knob(False, extension="experts")
    """Train a mixture of experts with the experts that vLLM chose for each token (R3, arXiv 2510.11370), so that
    sampler and trainer differ no more than a dense model's. Costs layers x experts per token bytes of host memory per
    token."""

    @property
    def policy_dtype(self) -> str:
        kwargs: dict[str, Any] = self.model_init_kwargs or {}  # type: ignore[assignment]
        dtype = kwargs["dtype"] if kwargs.get("dtype") is not None else kwargs.get("torch_dtype")
        return default_dtype(self.optim) if dtype is None else str(dtype).removeprefix("torch.")

    def torch_dtype(self) -> torch.dtype | str:
        dtype = "auto" if self.policy_dtype == "auto" else getattr(torch, self.policy_dtype, None)
        if not isinstance(dtype, str | torch.dtype):
            raise ValueError(f"dtype {self.policy_dtype!r} isn't a dtype of torch: choose bfloat16, float32 or auto.")
        return dtype

    def _take_checkpointing(self) -> None:
        given = [[getattr(self, f"{name}{end}", None) for name in CHECKPOINTING] for end in ("", "_kwargs")]
        way, kwargs = (next((value for value in values if value is not None), None) for values in given)
        on = checkpointing_way(way)
        if isinstance(on, str):
            kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
            on, kwargs = True, {**(kwargs or {}), "offload": True}
        self._set_checkpointing(on, kwargs)

    def _set_checkpointing(self, on: bool | None, kwargs: Any) -> None:
        for name in CHECKPOINTING:
            if hasattr(self, name):
                setattr(self, name, on)
                setattr(self, f"{name}_kwargs", kwargs)

    @property
    def offloads_activations(self) -> bool:
        return bool((self.gradient_checkpointing_kwargs or {}).get("offload")) and self.checkpointing > 0

    @property
    def checkpointing(self) -> int:
        """Interval n of gradient checkpointing: every n-th layer recomputes its activations. 0: no layer does.

        If `gradient_checkpointing` is unset, the interval is 1 until the memory plan chooses one.
        """
        kwargs: dict[str, Any] = self.gradient_checkpointing_kwargs or {}
        return 0 if self.gradient_checkpointing is False else int(kwargs.get("every_n_layers", 1))

    def resolve_loading(self, **more: Any) -> None:
        self.model_init_kwargs = {**(self.model_init_kwargs or {}), **more}  # type: ignore[dict-item]

    def resolve_checkpointing(self, every: int) -> None:
        kwargs: dict[str, Any] = self.gradient_checkpointing_kwargs or {}
        self._set_checkpointing(every > 0, {**kwargs, "every_n_layers": every} if every > 1 else kwargs)

    def resolve_offload(self, streams: bool, gradients: bool, activations: bool) -> None:
        self.offload_optimizer: str = "stream" if streams else "none"
        self.offload_gradients: bool = getattr(self, "offload_gradients", False) or gradients
        if activations:
            kwargs: dict[str, Any] = self.gradient_checkpointing_kwargs or {}
            self._set_checkpointing(True, {**kwargs, "offload": True, "every_n_layers": 1})

    def resolve_precision(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"The policy's dtype is {dtype}, but must be bfloat16 or float32: set `dtype`.")
        self.optim: str = resolve_optimizer(self.optim, dtype)
        check_conflicts(self, about="optim")
        self.bf16: bool | None = (
            self.bf16 is not False and dtype == torch.float32
        )  # With `bf16` unset (None), a float32 policy runs under autocast.
        self.mixed_precision = "bf16" if self.bf16 else "no"

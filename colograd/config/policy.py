"""The policy: how it is loaded, and in which precision it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from .knob import knob


@dataclass
class PolicyKnobs(TrainingArguments):
    """The policy."""

    model_init_kwargs: dict[str, Any] | str | None = knob(
        None, "Keyword arguments of `from_pretrained`, when the model is given by name."
    )
    trust_remote_code: bool = knob(False, "Allow code that comes with a model.")
    disable_dropout: bool = knob(False, "Set every dropout probability to 0.")
    cast_lm_head_to_fp32: bool = knob(
        False,
        "Logits come out of the head's product in float32, in the policy, the reference and vLLM (where its version "
        "can), which brings the sampler's and the trainer's probabilities closer. The weight keeps its dtype (TRL "
        "casts it, in the policy and the reference alone).",
    )

    def _check_policy(self) -> None:
        if self.fp16:
            raise ValueError("fp16 is true, but policies train in bfloat16 or float32: set dtype instead.")
        if self.torch_compile:
            raise ValueError(
                "torch_compile is true, but packed rows have other lengths in each micro-batch, for which the policy "
                "would be compiled again and again: remove it (the engine and adamw_split compile what they can by "
                "themselves)."
            )

    @property
    def policy_dtype(self) -> str:
        """`bfloat16`, `float32` or `auto`: what the user asked for. Where nothing was said: `bfloat16`, or TRL's
        `float32` for an optimizer that was named and keeps no float32 master of bfloat16 weights."""
        kwargs: dict[str, Any] = self.model_init_kwargs or {}  # type: ignore[assignment]
        given = kwargs["dtype"] if kwargs.get("dtype") is not None else kwargs.get("torch_dtype")  # its old name
        default = "bfloat16" if self.optim in ("auto", "adamw_split") else "float32"
        return default if given is None else str(given).removeprefix("torch.")

    def torch_dtype(self) -> torch.dtype | str:
        """The dtype argument for `from_pretrained`.

        Raises:
            ValueError: there is no such dtype.
        """
        found = "auto" if self.policy_dtype == "auto" else getattr(torch, self.policy_dtype, None)
        if not isinstance(found, str | torch.dtype):
            raise ValueError(f"dtype {self.policy_dtype!r} isn't one: choose bfloat16, float32 or auto.")
        return found

    @property
    def checkpointing(self) -> int:
        """Every so many-th layer computes its activations again in the backward; 0: none. 1 before it is settled."""
        kwargs: dict[str, Any] = self.gradient_checkpointing_kwargs or {}
        return 0 if self.gradient_checkpointing is False else int(kwargs.get("every_n_layers", 1))

    def settle_checkpointing(self, every: int) -> None:
        """Resolve an unset ``gradient_checkpointing`` once the plan is known; see `checkpointing`."""
        self.gradient_checkpointing: bool | None = every > 0
        if every > 1:
            given: dict[str, Any] = self.gradient_checkpointing_kwargs or {}
            self.gradient_checkpointing_kwargs: Any = {**given, "every_n_layers": every}

    def settle_precision(self, dtype: torch.dtype) -> None:
        """Resolve ``optim`` and ``bf16``, once the policy is loaded and its dtype known."""
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"The policy's dtype is {str(dtype).removeprefix('torch.')}, but policies train in bfloat16 or "
                "float32: set dtype, or convert the model."
            )
        if self.optim == "auto":
            self.optim: str = "adamw_split" if dtype == torch.bfloat16 else "adamw_torch"
        self.bf16: bool | None = self.bf16 is not False and dtype == torch.float32  # None: on, as in TRL
        self.mixed_precision = "bf16" if self.bf16 else "no"

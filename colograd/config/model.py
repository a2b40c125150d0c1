"""Which model, in which precision. Names as in TRL's ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .names import names_checked

DTYPES = ("auto", "bfloat16", "float32")
# Names by which transformers knows attention kernels. The trainer's packed attention takes their place.
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community")


@names_checked
@dataclass
class ModelConfig:
    """The policy to start from."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A Hub id or a local folder, as transformers takes them."}
    )
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub model."})
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Precision of the policy: `bfloat16` (the default; an exact float32 master is kept by the "
            "optimizer), `float32`, or `auto` (the checkpoint's own).",
        },
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Accepted for compatibility: training always runs Colograd's packed attention, and a line says so."
        },
    )
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter. Not available in this version."})
    lora_r: int = field(default=16, metadata={"help": "LoRA rank."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA alpha."})
    lora_dropout: float = field(default=0.05, metadata={"help": "LoRA dropout."})
    lora_target_modules: list[str] | None = field(default=None, metadata={"help": "LoRA target modules."})
    lora_target_parameters: list[str] | None = field(default=None, metadata={"help": "LoRA target parameters."})
    lora_modules_to_save: list[str] | None = field(default=None, metadata={"help": "Layers trained beside LoRA's."})
    lora_task_type: str = field(default="CAUSAL_LM", metadata={"help": "peft's task type."})
    use_rslora: bool = field(default=False, metadata={"help": "Rank-stabilised LoRA."})
    use_dora: bool = field(default=False, metadata={"help": "Weight-decomposed LoRA."})
    load_in_8bit: bool = field(default=False, metadata={"help": "8-bit base for LoRA. Not available in this version."})
    load_in_4bit: bool = field(default=False, metadata={"help": "4-bit base for LoRA. Not available in this version."})

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype.removeprefix("torch.") not in DTYPES:
            raise ValueError(
                f"dtype {self.dtype!r} isn't supported: choose one of {', '.join(DTYPES)}, or leave it out (bfloat16)."
            )
        for name in ("use_peft", "load_in_8bit", "load_in_4bit"):
            if getattr(self, name):
                raise ValueError(f"{name}: true isn't available in this version: remove it (full fine-tuning).")
        attention = self.attn_implementation
        if attention is not None and not attention.startswith(KNOWN_ATTENTION):
            raise ValueError(
                f"attn_implementation {attention!r} is unknown: remove it (training runs the packed attention)."
            )

    def init_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `GRPOConfig.model_init_kwargs`."""
        given = {"revision": self.model_revision, "dtype": self.dtype}
        return {key: value for key, value in given.items() if value is not None}

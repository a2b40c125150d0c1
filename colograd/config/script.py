"""Settings of the model (`ModelConfig`), and of data and rewards (`ScriptArguments`). TRL has both classes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .conflicts import check_conflicts
from .knob import check_values, knob, names_checked, quantized

DTYPES = ("auto", "bfloat16", "float32")


@names_checked
@dataclass
class ModelConfig:
    """Settings of the model that training starts from, and of its LoRA adapter."""

    model_name_or_path: str | None = knob(None, "A Hub id or a local folder, as transformers takes them.")
    model_revision: str | None = knob(None, "Branch, tag or commit of a Hub model.")
    dtype: str | None = knob(None, one_of=DTYPES, spellings={f"torch.{dtype}": dtype for dtype in DTYPES})
    """Precision of the policy: `bfloat16` (the optimizer keeps an exact float32 master), `float32`, or `auto` (the
    checkpoint's). Default: bfloat16, or float32 if `optim` names another optimizer."""
    attn_implementation: str | None = knob(None)
    """For compatibility only: training always uses Colograd's packed attention."""
    use_peft: bool = knob(False, "Train a LoRA adapter (peft) on the frozen model; see docs/guide/lora.md.")
    lora_r: int = knob(16, "Rank of the adapter's matrices.", at_least=1, remedy="raise it (16 is usual)")
    lora_alpha: int = knob(32, "The adapter is scaled by `lora_alpha / lora_r`.")
    lora_dropout: float = knob(0.05, at_least=0, below=1, remedy="0 turns it off")
    """Dropout before the adapter in training (vLLM samples without)."""
    lora_target_modules: list[str] | None = knob(None)
    """Names of the layers to adapt, `all-linear`, or one regular expression for whole names, as in TRL; default: peft's
    for the architecture."""
    lora_target_parameters: list[str] | None = knob(None)
    """Names of parameters outside linear layers to adapt: a mixture's `mlp.experts.gate_up_proj` and
    `mlp.experts.down_proj`. The engine gets merged copies; needs `lora_dropout: 0`."""
    lora_modules_to_save: list[str] | None = knob(None)
    """Modules that are trained whole, in addition to the adapter. The engine gets merged copies."""
    lora_task_type: str = knob("CAUSAL_LM", "peft's task type; always `CAUSAL_LM`.", one_of=("CAUSAL_LM",))
    use_rslora: bool = knob(False, "Rank-stabilised LoRA: scaled by `lora_alpha / sqrt(lora_r)`.")
    use_dora: bool = knob(False, "Weight-decomposed LoRA. The engine gets merged copies.")
    load_in_8bit: bool = quantized(False, "Quantise the base below the adapter to 8 bits (docs/guide/lora.md).")
    load_in_4bit: bool = quantized(False, "Quantise the base below the adapter to 4 bits (docs/guide/lora.md).")
    bnb_4bit_quant_type: str = quantized("nf4", one_of=("nf4", "fp4"))
    """The sixteen values of `load_in_4bit`: `nf4` or `fp4`."""
    use_bnb_nested_quant: bool = quantized(False, "With `load_in_4bit`, quantise the scales too.")
    bnb_4bit_quant_storage: str | None = quantized(None)
    """With `load_in_4bit`, the dtype whose elements hold the bits; default: `uint8`."""

    def __post_init__(self) -> None:
        check_values(self)
        check_conflicts(self)

    def peft_config(self) -> Any:
        """Return the `peft.LoraConfig` for ``GRPOTrainer(peft_config=...)``, or None without ``use_peft``."""
        if not self.use_peft:
            return None
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ValueError(f"use_peft is true, but peft can't be imported ({error}). Run pip install peft.") from None
        targets: Any = self.lora_target_modules
        if len(targets or ()) == 1 and (targets[0] == "all-linear" or not re.fullmatch(r"[\w.]+", targets[0])):
            targets = targets[0]  # peft reads `all-linear` and regular expressions only outside a list.
        names = ("task_type", "r", "target_parameters", "modules_to_save")
        renamed = {name: getattr(self, f"lora_{name}") for name in names}
        same = {name: getattr(self, name) for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
        return LoraConfig(**renamed, **same, target_modules=targets, bias="none")

    def init_kwargs(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"revision": self.model_revision, "dtype": self.dtype}
        if self.load_in_8bit:
            settings["quantization_config"] = {"load_in_8bit": True}
        elif self.load_in_4bit:
            kind, nested = self.bnb_4bit_quant_type, self.use_bnb_nested_quant
            four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
            storage = {"bnb_4bit_quant_storage": self.bnb_4bit_quant_storage} if self.bnb_4bit_quant_storage else {}
            settings["quantization_config"] = four | storage
        return {key: value for key, value in settings.items() if value is not None}


@names_checked
@dataclass
class ScriptArguments:
    """Settings of ``colograd train`` outside `GRPOConfig` and `ModelConfig`: dataset, rewards, tools, agent."""

    dataset_name: str | None = knob(None)
    """The dataset: a Hub id, a local .json, .jsonl, .csv or .parquet file or folder, or the import path
    `package.module:function` of a function that returns a `datasets.Dataset` or `DatasetDict`."""
    dataset_config: str | None = knob(None, "The dataset's configuration (its `name` in `load_dataset`).")
    dataset_kwargs: dict[str, Any] | str | None = knob(None)
    """Keyword arguments for the dataset function, or for `load_dataset`."""
    dataset_train_split: str = knob("train", "The split to train on.")
    dataset_test_split: str = knob("test", "The split to evaluate on, if it exists.")
    datasets: list[dict[str, Any]] | str | None = knob(None)
    """A mixture, in place of `dataset_name`: a list of mappings with `path` and optionally `name`, `data_dir`,
    `data_files`, `split`, `columns`, `fraction` (each part's share, in all or none) and `source` (its value in a column
    `source`, for `curriculum`)."""
    exams: list[str] = knob([], extension="evaluation")
    """Benchmarks of an evaluation: tasks, groups or tags of lm-evaluation-harness such as `gsm8k`, or a task's YAML
    file; `name[:100]`: the first rows, `name@4`: 4 completions per question; see docs/guide/evaluation.md."""
    test_split_size: float | None = knob(None, "Share or number of examples of a mixture to hold out for evaluation.")
    dataset_streaming: bool = knob(False, "Read a stored dataset during training; needs `max_steps`.")
    streaming: bool = knob(False, "The same for a mixture (`datasets`).")
    dataset_prompt_column: str = knob("prompt", "The column with the prompt.")
    system_prompt: str | None = knob(None)
    """A system message before each prompt; a plain prompt becomes a conversation."""
    reward_model_name_or_path: str | None = knob(None, "A reward model, taken as the first of `reward_funcs`.")
    reward_funcs: list[str] = knob([])
    """The reward functions: names of built-in rewards, import paths (`package.module:function`), or reward models (a
    folder or a Hub id)."""
    tools: list[str] = knob([], "Import paths of functions that the model may call.", extension="tools")
    environment_factory: str | None = knob(None, extension="tools")
    """Import path of what makes environments, often a class; or a dict of such paths."""
    rollout_func: str | None = knob(None)
    """Import path of a function that writes completions in the engine's place, or of a class (a rollout source)."""
    agent: str | None = knob(None, extension="agents")
    """A program that calls the model over HTTP, once per completion: a function's import path, or a command line."""
    ignore_bias_buffers: bool = knob(False)

    def __post_init__(self) -> None:
        check_values(self)

    def all_rewards(self) -> list[str]:
        return [*([self.reward_model_name_or_path] if self.reward_model_name_or_path else []), *self.reward_funcs]

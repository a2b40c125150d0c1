"""The policy and its tokenizer: loaded once, checked, set to packed rows where it can take them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from .config import GRPOConfig
from .parity import choose_rows
from .ranks import world_size


@dataclass(frozen=True, slots=True)
class Policy:
    """What is trained, and where the engine finds the same weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str  # folder or Hub id that vLLM can load
    untouched: bool  # loaded by us: bit-equal to the checkpoint at ``path``
    why_padded: str  # why its sequences can't be packed into one row; empty: they are

    @property
    def context(self) -> int:
        """Longest sequence the model takes, in tokens."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 2**31)

    def describe(self, config: GRPOConfig, max_tokens: int) -> list[str]:
        """What the user should know at start, in lines."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        budget = f"{max_tokens:,} tokens" if max_tokens else "as many tokens as fit"
        lines = [
            f"policy: {self.model.num_parameters() / 1e6:,.0f} M parameters, {dtype}, {config.optim}; "
            f"{config.prompts_per_step} prompts x {config.num_generations} completions per step on {world_size()} "
            f"rank(s) of {torch.get_num_threads()} thread(s), micro-batches of {budget}"
        ]
        if self.why_padded:
            lines.append(f"rows: padded, each completion with its prompt ({self.why_padded})")
        if self.model.dtype == torch.bfloat16 and config.optim != "adamw_split":
            lines.append(
                f"optimizer: {config.optim} rounds each update to bfloat16 and loses small ones; `adamw_split` doesn't"
            )
        return lines


def load_policy(
    model: str | os.PathLike[str] | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: GRPOConfig
) -> Policy:
    """Load the model if it is a name, its tokenizer if none is given.

    Raises:
        ValueError: no such model, or one whose log-probabilities can't be computed.
    """
    untouched = isinstance(model, str | os.PathLike)
    if isinstance(model, str | os.PathLike):
        path = str(model)
        loaded = _from_name(path, config)
    else:
        if config.model_init_kwargs is not None:
            raise ValueError("model_init_kwargs is set, but the model was given as an object: remove one of the two.")
        if hasattr(model, "peft_config"):
            raise ValueError("The model is a PeftModel, but adapters aren't available in this version: merge it first.")
        loaded, path = model, str(model.config._name_or_path or "")
        if not path:
            raise ValueError(
                "The model was given as an object that no checkpoint belongs to (config._name_or_path is empty), so "
                "vLLM has nothing to load: save it with save_pretrained and give the folder."
            )
    why_padded = choose_rows(loaded)
    if tokenizer is None:
        revision = (config.model_init_kwargs or {}).get("revision")  # type: ignore[union-attr]
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=config.trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.disable_dropout:
        for module in loaded.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return Policy(loaded, tokenizer, path, untouched, why_padded)


def _from_name(path: str, config: GRPOConfig) -> PreTrainedModel:
    kwargs: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    kwargs["dtype"] = config.torch_dtype()
    kwargs.pop("attn_implementation", None)  # `choose_rows` settles it
    kwargs.setdefault("trust_remote_code", config.trust_remote_code)
    if not config.verbose and os.path.isdir(path):
        hf_logging.disable_progress_bar()  # a download keeps its bar
    try:
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        if os.path.isdir(path) and not isinstance(error, FileNotFoundError) and _has_config(path):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The model {path!r} is neither a folder with a model nor a Hub model that can be loaded ({reason}) Give "
            "model_name_or_path a folder that save_pretrained wrote, or a Hub id; `make model` makes the "
            "quickstart's."
        ) from None
    finally:
        if not config.verbose:
            hf_logging.disable_progress_bar()  # nor one for each file that is saved


def _has_config(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "config.json"))

"""Load the policy and its tokenizer, check both, and choose packed or padded rows. Make models on the meta device."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from ..batch import ModelInput
from ..config import GRPOConfig
from ..config.policy import KEEPS_MASTER
from ..data.columns import check_rows, surplus_rows
from ..parallel.ranks import world_size
from ..parallel.shards import parts_of
from ..runtime import cpu_products, registry
from ..runtime.hub import check_model_name
from ..runtime.shipped import file_or_shipped
from .head import vocabulary_size
from .layers import disable_dropout, largest_dropout, tells_routing
from .logprobs import products_in_float32
from .lora import Adapter, adapter_folder, is_adapted, unwrap, wrap
from .row_proof import choose_rows, expect_rows
from .supported import features, read_config
from .towers import freeze_unread, has_tower, hears, reads_text_alone, set_text_alone


@dataclass(frozen=True, slots=True)
class Policy:
    model: PreTrainedModel  # The transformers model, or the PeftModel around it.
    tokenizer: PreTrainedTokenizerBase
    path: str  # Folder or Hub id of the checkpoint that vLLM loads: for an adapter, of its base.
    untouched: bool  # Whether the user named the model, so that Colograd loaded its weights from `path`.
    why_padded: str  # Reason why sequences can't be packed into one row. Empty means that rows are packed.
    adapter: Adapter | None = None
    new_adapter: bool = False  # Whether this run added the adapter.
    processor: Any = None  # Processor of a model that reads images. None: the run trains the model as a text model.

    @property
    def quantization(self) -> Any:
        return getattr(unwrap(self.model), "quantization", None)

    @property
    def image_token(self) -> int:
        return int(self.model.config.image_token_id)

    @property
    def checkpointing(self) -> tuple[int, ...]:
        """Possible intervals n of activation checkpointing (every n-th layer computes its activations twice; 0: no
        layer), least recomputation first."""
        model = unwrap(self.model)
        if not model.supports_gradient_checkpointing:
            return (0,)
        some = "every_n_layers" in inspect.signature(PreTrainedModel._set_gradient_checkpointing).parameters
        return (0, 4, 2, 1) if some else (0, 1)

    @property
    def context(self) -> int:
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 2**31)

    @property
    def rows(self) -> int:
        """Number of token ids in the model's input embedding, including padding ids that no token has."""
        return vocabulary_size(unwrap(self.model))

    @property
    def tells_routing(self) -> bool:
        return tells_routing(unwrap(self.model))

    def router_coef(self, config: GRPOConfig) -> float:
        """Return the coefficient of the load-balancing loss, 0 for a model without routers' logits."""
        text, asked = self.model.config.get_text_config(), config.router_aux_loss_coef
        if self.tells_routing:
            return float(getattr(text, "router_aux_loss_coef", 0.0) if asked is None else asked)
        if asked:
            raise ValueError(
                f"router_aux_loss_coef is {asked}, but {type(unwrap(self.model)).__name__} returns no router logits, "
                "and so has no load-balancing loss: remove router_aux_loss_coef."
            )
        return 0.0

    @property
    def end_tokens(self) -> set[int | None]:
        named = getattr(self.model.generation_config, "eos_token_id", None)
        also = named if isinstance(named, list) else [named]
        return {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, *also}

    def describe(self, config: GRPOConfig, max_tokens: int) -> Iterator[str]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        budget = f"{max_tokens:,} tokens" if max_tokens else "as many tokens as fit"
        every, inner = config.checkpointing, unwrap(self.model)
        layers = {0: "no layer", 1: "every layer"}.get(every, f"one layer in {every}")
        parts = parts_of(self.model)  # Shards of the weights, if an engine's ranks hold one policy together.
        elements = self.model.num_parameters() if parts is None else parts.elements
        named = [(name, p.shape) for name, p in self.model.named_parameters() if p.requires_grad]
        trained = sum(math.prod(shape if parts is None else parts.shards[name].shape) for name, shape in named)
        inputs = ", their inputs kept in host memory" if config.offloads_activations else ""
        share = f", {trained / 1e6:,.2f} M trained (LoRA)" if self.adapter else ""
        yield (
            f"policy: {elements / 1e6:,.0f} M parameters{share}, {dtype}, {config.optim}; "
            f"{config.prompts_per_step} prompts x {config.num_generations} completions per step on {world_size()} "
            f"rank(s) of {torch.get_num_threads()} thread(s), micro-batches of {budget}, "
            f"activations of {layers} computed twice{inputs}"
        )
        for feature in features():
            yield from feature.notes(self, config)
        yield from surplus_rows(self.tokenizer, self.rows)
        if reads_text_alone(inner):
            kind = inner.config.model_type
            yield f"policy: text alone is trained; vision and audio parts of {kind} are frozen, and not in the engine"
        elif hears(inner.config):
            yield "policy: the model's audio tower is frozen, and not in the engine"
        if self.why_padded:
            yield f"rows: padded, each completion with its prompt ({self.why_padded})"

    def warnings(self, config: GRPOConfig) -> Iterator[str]:
        rounded = any(p.requires_grad and p.dtype == torch.bfloat16 for p in self.model.parameters())
        if rounded and config.optim not in KEEPS_MASTER:
            yield f"optimizer: {config.optim} rounds updates to bfloat16 and loses small ones; `adamw_split` doesn't"
        if (dropout := largest_dropout(self.model)) > 0:
            yield (
                f"policy: it trains with dropout (up to {dropout:g}, from its configuration) and samples without, so "
                "its log-probabilities differ from the sampler's: `disable_dropout: true` turns it off"
            )


def load_policy(
    model: str | os.PathLike[str] | PreTrainedModel, tokenizer: Any, config: GRPOConfig, peft_config: Any = None,
    has_images: bool = False,
) -> Policy:  # fmt: skip
    """Load the policy, its adapter and its tokenizer, and check them. A run on a GPU checks packed rows later."""
    untouched = isinstance(model, str | os.PathLike)
    path, tokenizer_path = str(model) if untouched else _origin(model, config, peft_config), ""
    if not untouched:
        loaded: Any = model
    elif (saved := adapter_folder(path)) is None:
        loaded = from_name(path, config, has_images=has_images)
    else:
        registry.require("lora", f"`model: {path}`")
        (from_adapter,) = registry.hooks("saved_adapter")
        loaded, path, tokenizer_path = from_adapter(path, saved, config, peft_config, has_images)
    set_text_alone(unwrap(loaded), has_images)
    freeze_unread(unwrap(loaded))
    for feature in features():
        feature.on_load(unwrap(loaded), path, config)
    if peft_config is not None:
        loaded = wrap(loaded, peft_config, config.seed)
    adapter: Adapter | None = None
    if is_adapted(loaded):
        registry.require("lora", "a PeftModel")
        (take_adapter,) = registry.hooks("adapter")
        adapter = take_adapter(loaded)
    # A tensor-parallel engine gets the adapter merged into the weights, unless the policy is divided like the engine.
    copies_into_parts = config.vllm_tensor_parallel_size > 1 and not config.tensor_parallel
    if adapter is not None and not adapter.why_merged and copies_into_parts:
        adapter = dataclasses.replace(adapter, why_merged="ranks share the engine")
    reentrant = (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if adapter is not None and config.checkpointing and reentrant:
        loaded.enable_input_require_grads()  # Reentrant checkpointing needs an input that requires a gradient.
    if config.on_cpu:
        cpu_products.take_over(loaded)
    with cpu_products.constant_weights():
        why_padded = choose_rows(loaded) if config.on_cpu else expect_rows(loaded)
    processors = (feature.processor(unwrap(loaded), path, tokenizer, config) for feature in features())
    processor = next((each for each in processors if each is not None), None)
    if processor is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = processor.tokenizer
    if tokenizer is None:
        revision = (config.model_init_kwargs or {}).get("revision")  # type: ignore[union-attr]
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_path or path, revision=revision, trust_remote_code=config.trust_remote_code
        )
    check_tokenizer(tokenizer)
    if config.chat_template_path is not None:
        tokenizer.chat_template = chat_template(config.chat_template_path)
        if processor is not None:
            processor.chat_template = tokenizer.chat_template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.eos_token_id is not None:
        rows = vocabulary_size(unwrap(loaded))
        check_rows([tokenizer.eos_token_id], rows, tokenizer, "processing_class, as its end of a text,")
    if config.disable_dropout:
        disable_dropout(loaded)
    if config.cast_lm_head_to_fp32:
        products_in_float32(loaded)
    for set_up in registry.hooks("policy"):
        set_up(loaded, config)
    return Policy(loaded, tokenizer, path, untouched, why_padded, adapter, peft_config is not None, processor)


def proven_on(policy: Policy, prompts: Sequence[ModelInput]) -> Policy:
    """Return ``policy``, with padded rows if packed rows fail a check on ``prompts``, which may have images."""
    if not prompts:
        return policy
    return dataclasses.replace(policy, why_padded=choose_rows(policy.model, why=policy.why_padded, asked=prompts))


def check_tokenizer(given: Any) -> None:
    if isinstance(given, PreTrainedTokenizerBase):
        return
    kind = type(given).__name__
    if hasattr(given, "tokenizer"):
        raise ValueError(
            f"processing_class is a {kind}, a multimodal processor, but the model reads only text in this run: pass "
            "the processor's tokenizer (processing_class.tokenizer)."
        )
    raise ValueError(f"processing_class is a {kind}, but it must be a tokenizer of transformers, or None.")


def chat_template(path: str) -> str:
    try:
        return file_or_shipped(Path(path)).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"chat_template_path is {path!r}, which can't be read ({error.strerror}): give a Jinja template's path."
        ) from None


def _origin(model: Any, config: GRPOConfig, peft_config: Any) -> str:
    if config.model_init_kwargs is not None:
        raise ValueError(
            "model_init_kwargs is set, but the model was passed as an object: remove model_init_kwargs, or pass the "
            "model's name or folder."
        )
    if is_adapted(model) and peft_config is not None:
        raise ValueError(
            "The model is a PeftModel and peft_config is set, but only one adapter is trained. Remove peft_config to "
            "train this adapter. For a new one, save the result of `merge_and_unload()` and pass its folder as `model`."
        )
    if not is_adapted(model) and hasattr(model, "peft_config"):
        raise ValueError(
            "The model has an adapter of transformers' own (add_adapter), not of peft: load the adapter with "
            "peft.PeftModel.from_pretrained(base, folder, is_trainable=True), or pass the adapter's folder as `model`."
        )
    path = str(model.config._name_or_path or "")
    if not path:
        raise ValueError(
            "The model was given as an object that comes from no checkpoint (config._name_or_path is empty), so vLLM "
            "has nothing to load: save the model with save_pretrained and pass its folder as `model`."
        )
    return path


def from_name(path: str, config: GRPOConfig, adapter: str = "", has_images: bool = False) -> PreTrainedModel:
    """Load the model at ``path``. Unless the run sets a quantisation, use the one recorded in folder ``adapter``."""
    kwargs: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    # Arguments left out: `load_arguments` sets quantisation, `policy_dtype` the dtype, `set_attention` the attention.
    for name in ("quantization_config", "load_in_8bit", "load_in_4bit", "torch_dtype", "attn_implementation"):
        kwargs.pop(name, None)
    kwargs["dtype"] = config.torch_dtype()
    kwargs.setdefault("trust_remote_code", config.trust_remote_code)
    saved = read_config(path, config)
    for feature in features():
        kwargs |= feature.load_arguments(saved, config, adapter or path)
    if not config.verbose and os.path.isdir(path):
        hf_logging.disable_progress_bar()  # No progress bar for a folder. A download keeps its bar.
    try:
        kind = AutoModelForImageTextToText if has_tower(saved) else AutoModelForCausalLM
        loaded = kind.from_pretrained(path, **kwargs)
        for feature in features():
            feature.on_read(loaded)
        set_text_alone(loaded, has_images)
        return loaded
    except (OSError, ValueError) as error:
        has_config = os.path.isfile(os.path.join(path, "config.json"))
        if has_config and not isinstance(error, OSError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The model {path!r} is neither a folder with a model nor a Hub model that can be loaded ({reason}). Name "
            "a folder that save_pretrained wrote, or a Hub id. The quickstart's model is made "
            "by `make model` or `python -m colograd.apps.quickstart.quickstart`."
        ) from None
    finally:
        if not config.verbose:
            hf_logging.disable_progress_bar()


def outline(path: str, dtype: torch.dtype, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Make the model at ``path`` on the meta device: its parameters have shapes but no values."""
    check_model_name(path, revision=revision)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
        kind = AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM
        with torch.device("meta"):
            return kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path!r} has no configuration of a causal language model ({reason}). Give a folder with config.json, or "
            "a Hub id."
        ) from None


def with_adapter(model: Any, peft_config: Any) -> Any:
    with torch.device("meta"), warnings.catch_warnings():
        # For fused experts peft adds rank patterns, then warns that these patterns match no linear layer.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match")
        return wrap(model, peft_config, seed=0)


def to_pack(model: Any, settings: Mapping[str, Any]) -> dict[torch.Tensor, int]:
    """Return {parameter: bytes after quantisation} for the parameters that ``settings`` quantise in an `outline`."""
    return registry.hooks("to_pack")[0](model, settings) if settings else {}

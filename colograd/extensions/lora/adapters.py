"""Creation and loading of LoRA adapters (peft), and checks of the limits of peft, vLLM and saved files."""

from __future__ import annotations

import copy
import os
import re
import types
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ...config import GRPOConfig
from ...policy.attention import autocast_dtype
from ...policy.loading import from_name
from ...policy.lora import AdaptedLayer, Adapter, adapted_layers, base_name, trained_copies, unwrap
from ...policy.towers import HEARS, has_tower, hears, reads_text_alone, sees

LARGEST_RANK = 512  # vLLM's limit of a LoRA's rank.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")  # Values of `init_lora_weights` that leave the base unchanged.
# Refused fields of peft's LoraConfig: they train or compute more than y = W x + scaling * B A x.
UNSUPPORTED = (
    "lora_bias", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
    "arrow_config", "use_bdlora", "megatron_config",
)  # fmt: skip


def wrap(model: Any, peft_config: Any, seed: int) -> Any:
    check_lora_config(peft_config)
    import peft

    if patterns := _left_out(model, peft_config):
        peft_config = copy.copy(peft_config)
        excluded = peft_config.exclude_modules or []  # peft takes a regular expression or a list of names.
        names = not isinstance(excluded, str)
        patterns += [rf"(.*\.)?{re.escape(name)}" for name in excluded] if names else [f"(?:{excluded})"]
        peft_config.exclude_modules = "|".join(patterns)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft_config).eval()  # Evaluation mode, as after `from_pretrained`.
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            if "lora_dropout" in reason:
                raise ValueError(
                    f"lora_dropout is {peft_config.lora_dropout}, but peft has no dropout for a LoRA on parameters "
                    "such as a mixture's experts: set lora_dropout: 0, or adapt only the attention's layers."
                ) from None
            raise ValueError(
                f"peft can't adapt {type(model).__name__} ({reason}): set lora_target_modules (target_modules "
                "in a LoraConfig) to names of the model's linear layers, or to all-linear."
            ) from None


def _left_out(model: Any, peft_config: Any) -> list[str]:
    """Return regular expressions that match the names of layers without an adapter:

    - layers outside the decoder, if the run trains the model on text alone, else only layers of audio towers
    - Linear subclasses with a forward of their own (Llama 4's routers), if target_modules is all-linear
    - modules that wrap a linear layer (in Gemma 4's tower), if target_modules has names: peft can't adapt them
    """
    found, targets = [], peft_config.target_modules
    if reads_text_alone(model):
        decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
        found.append(rf"(?!{re.escape(decoder)}\.).*")
    elif hears(getattr(model, "config", None)):
        found.append(rf"(.*\.)?({'|'.join(HEARS)})\..*")
    for name, module in model.named_modules():
        kind, last = type(module), name.rpartition(".")[2]
        if targets == "all-linear":
            of_model = isinstance(module, torch.nn.Linear) and kind.__module__.startswith("transformers.models.")
            unfit = of_model and "forward" in vars(kind)
        else:
            named = not isinstance(targets, str) and last in (targets or ())
            unfit = named and isinstance(getattr(module, "linear", None), torch.nn.Linear)
        if unfit:
            found.append(re.escape(name))
    return found


def check_lora_config(peft_config: Any) -> None:
    import peft

    if not isinstance(peft_config, peft.PeftConfig):
        raise ValueError(
            f"peft_config is {type(peft_config).__name__}, but must be a peft configuration: give peft.LoraConfig(...)."
        )
    if str(getattr(peft_config.peft_type, "value", peft_config.peft_type)) != "LORA":
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}, but only LoRA adapters (and DoRA) can be trained: give "
            "peft.LoraConfig(...)."
        )
    start = peft_config.init_lora_weights
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"init_lora_weights is {start!r}, which may change the base's weights, so that the saved adapter wouldn't "
            f"fit the base's checkpoint: set init_lora_weights to one of {', '.join(str(s) for s in PLAIN_STARTS)}."
        )
    for name in UNSUPPORTED:
        if getattr(peft_config, name, None):
            raise ValueError(f"Field {name} of the LoRA configuration can't be published to vLLM: remove it.")


def take_adapter(model: Any) -> Adapter:
    keep_inputs_as_they_are(model)
    if len(model.active_adapters) != 1 or len(model.peft_config) != 1:
        raise ValueError(
            f"A run trains exactly one adapter, but the PeftModel has {', '.join(model.peft_config)} "
            f"({len(model.active_adapters)} active): keep only one (delete_adapter), and activate it (set_adapter)."
        )
    (name,) = model.active_adapters
    config = model.peft_config[name]
    check_lora_config(config)
    layers = adapted_layers(model)
    if merged := [layer.name for layer in layers if layer.module.merged]:
        raise ValueError(f"The adapter is merged into the base ({merged[0]}): call unmerge_adapter() first.")
    if not any(layer.lora_b.requires_grad for layer in layers):
        raise ValueError("The adapter isn't trainable: load it with PeftModel.from_pretrained(..., is_trainable=True).")
    _check_head(model, layers)
    trained_base = [n for name, p in model.named_parameters() if p.requires_grad and (n := base_name(name)) is not None]
    for base in trained_base:
        if config.bias == "none" or not base.endswith(".bias"):
            raise ValueError(
                f"The base's {base} is trainable, but peft saves only the adapter: freeze it (requires_grad_(False)), "
                "or name its module in modules_to_save."
            )
    retrained = sorted({copy.rpartition(".")[0].rpartition(".")[2] for copy, _ in trained_copies(model)})
    embeddings = sorted({layer.name.rpartition(".")[2] for layer in layers if layer.is_embedding})
    seeing = [layer.name for layer in layers if has_tower(unwrap(model).config) and sees(layer.name)]
    rank = max(layer.lora_a.shape[0] // max(layer.experts, 1) for layer in layers)
    unserved = {
        "DoRA": any(layer.magnitude is not None for layer in layers),
        f"modules_to_save ({', '.join(retrained)})": bool(retrained),
        f"bias: {config.bias}": bool(trained_base),
        f"a LoRA on {', '.join(embeddings)}": bool(embeddings),
        "a LoRA on experts (target_parameters)": any(layer.experts for layer in layers),
        f"a LoRA on vision parts ({', '.join(seeing[:2])})": bool(seeing),
        f"rank {rank}, over {LARGEST_RANK}": rank > LARGEST_RANK,
    }
    why = ", ".join(reason for reason, applies in unserved.items() if applies)
    targets = tuple(sorted({layer.name.rpartition(".")[2] for layer in layers}))
    return Adapter(name, rank, targets, f"vLLM doesn't serve {why}" if why else "")


def _check_head(model: Any, layers: list[AdaptedLayer]) -> None:
    inner = unwrap(model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    if any(layer.module is head for layer in layers):
        raise ValueError(
            "The LoRA adapts the language-model head, but logits are computed in tiles from the head's weight alone: "
            "remove the head from lora_target_modules. An untied head may be in lora_modules_to_save."
        )
    tied = bool(getattr(inner.config.get_text_config(), "tie_word_embeddings", False))
    ends = tuple(f"{name}." for name, module in inner.named_modules() if module is head or module is embedding)
    changed = [layer.name for layer in layers if layer.module is embedding]
    changed += [name for name, _ in trained_copies(model) if name.startswith(ends)]
    if tied and changed:
        raise ValueError(
            f"The adapter changes {changed[0]}, but embedding and head are one tensor in this model (and in vLLM): "
            "remove both from lora_target_modules and lora_modules_to_save."
        )


def from_adapter(
    folder: str, saved: dict[str, Any], config: GRPOConfig, peft_config: Any, has_images: bool
) -> tuple[PreTrainedModel, str, str]:
    """Load a folder's adapter for training. Return the PeftModel, and the paths of its base and its tokenizer."""
    if peft_config is not None:
        raise ValueError(
            f"{folder!r} holds an adapter, but use_peft or peft_config requests a new one, and a run trains one only: "
            "remove use_peft and peft_config to train the saved adapter, or set model_name_or_path to the base model."
        )
    base = str(saved.get("base_model_name_or_path") or "")
    if not base:
        raise ValueError(
            f"{folder!r} holds an adapter that doesn't name its base: set base_model_name_or_path in its "
            "adapter_config.json."
        )
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"{folder!r} holds an adapter, but peft can't be imported ({error}): pip install peft."
        ) from None
    try:
        loaded = from_name(base, config, adapter=folder, has_images=has_images)
    except ValueError as error:
        raise ValueError(f"{folder!r} holds an adapter whose base can't be loaded: {error}") from None
    model = peft.PeftModel.from_pretrained(loaded, folder, is_trainable=True)
    has_tokenizer = os.path.isfile(os.path.join(folder, "tokenizer_config.json"))
    return model, base, folder if has_tokenizer else base


def keep_inputs_as_they_are(model: torch.nn.Module) -> None:
    """Make LoRA layers save their input uncast, so that queries, keys and values share one saved tensor.

    With peft's cast, autograd would save a float32 copy for each layer. Layers with dropout or DoRA keep the cast.
    Under autocast no tensor is shared: each layer saves a copy in autocast's dtype.
    """
    for layer in model.modules():
        inputs: Any = getattr(layer, "lora_A", None)
        if not inputs or getattr(layer, "lora_variant", None) or not hasattr(layer, "cast_input_dtype_enabled"):
            continue
        drops = any(getattr(dropout, "p", 0.0) > 0 for dropout in layer.lora_dropout.values())
        if all(type(a) is torch.nn.Linear for a in inputs.values()) and not drops:
            layer.cast_input_dtype_enabled = False
            for a in inputs.values():
                # A bound method, because deepcopy of a layer binds the method's copy to the layer's copy.
                a.forward = types.MethodType(_product, a)


def _product(a: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == a.weight.dtype or autocast_dtype(x.device) is not None:
        return F.linear(x.to(a.weight.dtype), a.weight)
    return _CastProduct.apply(x, a.weight)


class _CastProduct(torch.autograd.Function):
    """Product W x with x cast to W's dtype. Autograd saves x uncast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        to_x = (gradient @ weight).to(x.dtype) if needs_x else None
        to_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2).to(weight.dtype) if needs_weight else None
        return to_x, to_weight

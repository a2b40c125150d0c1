"""LoRA policies (peft): the adapted layers, the limits of vLLM, and the model inside the wrapper.

The base stays as in the checkpoint: nothing here or in `weights/` ever merges the adapter into the policy.
"""

from __future__ import annotations

import copy
import json
import os
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .attention import autocast_dtype
from .packed_weights import dense_weight
from .towers import HEARS, has_tower, hears, reads_text_alone, sees

PREFIX = "base_model.model."  # prefix of every parameter name of a PeftModel
LARGEST_RANK = 512  # largest rank of vLLM's adapter slots
# Initialisations that don't change the base's weights. (`pissa`, `olora`, `loftq` and similar ones subtract from them.)
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
# Fields of peft's LoraConfig that make a layer differ from the formula of `AdaptedLayer`.
UNSUPPORTED = (
    "lora_bias", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
    "arrow_config", "use_bdlora", "megatron_config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter that a run trains instead of the model's weights."""

    name: str  # peft's name of the adapter, usually `default`
    rank: int  # largest rank of its layers
    targets: tuple[str, ...]  # last names of the adapted layers: q_proj, down_proj, ...
    why_merged: str  # reason why vLLM can't serve it and gets merged weights instead; empty: vLLM can


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """Layer y = W x + scaling * B A x (LoRA, arXiv 2106.09685).

    With DoRA (arXiv 2402.09353, equation 5) each row of W + scaling * B A is scaled to a trained length. For a
    parameter of E experts, A has E times the rows and B has E times the columns.
    """

    name: str  # name in the model without adapters: model.layers.0.self_attn.q_proj, or ... .mlp.experts.down_proj
    parameter: str  # adapted parameter: model.layers.0.self_attn.q_proj.weight; for experts equal to ``name``
    module: Any  # peft's layer around the base's
    lora_a: torch.Tensor  # A, (rank, in); for an embedding (rank, vocabulary)
    lora_b: torch.Tensor  # B, (out, rank)
    scaling: float  # alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA
    magnitude: torch.Tensor | None  # DoRA's row lengths, (out,); None without DoRA
    is_embedding: bool
    experts: int = 0  # number of experts E; 0: an ordinary layer

    @classmethod
    def of(cls, name: str, module: Any, adapter: str) -> AdaptedLayer:
        """Describe the layer that carries peft's ``adapter``; the tensors are the parameters themselves."""
        parameter = f"{name}.weight"
        if (own := getattr(module, "parameter_name", None)) is not None:  # peft nests such layers
            name = parameter = ".".join([*(part for part in name.split(".") if part != "base_layer"), own])
        scaling, magnitudes = float(module.scaling[adapter]), getattr(module, "lora_magnitude_vector", None) or {}
        magnitude = magnitudes[adapter].weight if adapter in magnitudes else None
        if adapter in module.lora_embedding_A:
            a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
            return cls(name, parameter, module, a, b, scaling, magnitude, is_embedding=True)
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        experts = 0 if own is None else module.num_experts
        return cls(name, parameter, module, a, b, scaling, magnitude, is_embedding=False, experts=experts)

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Merge base and adapter into one matrix: a new float32 tensor in the base weight's layout."""
        if self.experts:
            return self._merged_experts()
        base = dense_weight(self.module.get_base_layer())
        turned = self.is_embedding or getattr(self.module, "fan_in_fan_out", False)  # stored as (in, out)
        delta = (self.lora_b.float() @ self.lora_a.float()).mul_(self.scaling)
        weight = delta.add_(base.t() if turned else base)
        if self.magnitude is not None:
            weight.mul_((self.magnitude.float() / torch.linalg.norm(weight, dim=1))[:, None])
        return weight.t() if turned else weight

    def _merged_experts(self) -> torch.Tensor:
        base = self.module.get_param()
        a = self.lora_a.float().view(self.experts, -1, self.lora_a.shape[1])  # (E, rank, in)
        b = self.lora_b.float().view(len(self.lora_b), -1, self.experts).permute(2, 0, 1)  # (E, out, rank)
        delta = torch.bmm(b, a).mul_(self.scaling).view(-1, len(self.lora_b), self.lora_a.shape[1])
        if getattr(self.module.get_base_layer(), "is_transposed", False):
            delta = delta.transpose(1, 2)
        return (delta if base.dim() == 3 else delta[0]).add_(base)


def is_adapted(model: Any) -> bool:
    """Return whether the model is a PeftModel."""
    return hasattr(type(model), "get_base_model")


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a PeftModel, or any other model unchanged."""
    return model.get_base_model() if is_adapted(model) else model


def base_name(name: str) -> str | None:
    """Return a parameter's name in the model without adapters; None for tensors that only the adapter has.

    ``base_model.model.lm_head.base_layer.weight`` -> ``lm_head.weight``; also for the engine's wrapped layers.
    """
    parts = name.removeprefix(PREFIX).split(".")
    if "modules_to_save" in parts or any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def adapted_layers(model: Any) -> list[AdaptedLayer]:
    """Return the layers of a PeftModel that carry its active adapter, in the model's order."""
    (adapter,) = model.active_adapters
    return [
        AdaptedLayer.of(name.removeprefix(PREFIX), module, adapter)
        for name, module in model.named_modules()
        if adapter in getattr(module, "lora_A", ()) or adapter in getattr(module, "lora_embedding_A", ())
    ]


def trained_copies(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model without adapters, parameter) of modules that peft trains whole (``modules_to_save``)."""
    (adapter,) = model.active_adapters
    for name, parameter in model.named_parameters():
        head, found, tail = name.partition(f".modules_to_save.{adapter}.")
        if found:
            yield f"{head.removeprefix(PREFIX)}.{tail}", parameter


def wrap(model: Any, peft_config: Any, seed: int) -> Any:
    """Make a PeftModel around ``model``, with a new adapter that is the same on every rank.

    Raises:
        ValueError: the configuration isn't for LoRA, or matches no layers.
    """
    check_lora_config(peft_config)
    import peft

    left_out = _left_out(model, peft_config)
    if left_out:
        peft_config = copy.copy(peft_config)
        peft_config.exclude_modules = "|".join([*left_out, *_excluded(peft_config.exclude_modules)])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, peft_config).eval()  # evaluation mode, as after from_pretrained
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            if "lora_dropout" in reason:  # peft adapts experts' gate_proj and similar ones as parameters
                raise ValueError(
                    f"lora_dropout is {peft_config.lora_dropout}, but peft has no dropout before a LoRA on parameters, "
                    "as a mixture's experts are: set lora_dropout: 0, or adapt the attention's layers alone."
                ) from None
            raise ValueError(
                f"peft can't adapt {type(model).__name__} ({reason}) Set lora_target_modules (the LoraConfig's "
                "target_modules) to names of its linear layers, or to all-linear."
            ) from None


def _excluded(given: Any) -> list[str]:
    """Turn peft's `exclude_modules` into patterns of whole names."""
    if given is None or isinstance(given, str):
        return [f"(?:{given})"] if given else []
    return [rf"(.*\.)?{re.escape(name)}" for name in given]


def _left_out(model: Any, peft_config: Any) -> list[str]:
    """Return patterns of layers that get no adapter.

    - Everything outside the decoder if only text is trained, or else the audio tower.
    - With `all-linear`: routers of a class derived from Linear, because their forward returns two tensors (Llama 4).
    - With names of layers: layers that wrap a linear layer, because peft doesn't know them (Gemma 4's tower).
    """
    found = []
    if reads_text_alone(model):
        decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
        found.append(rf"(?!{re.escape(decoder)}\.).*")
    elif hears(getattr(model, "config", None)):
        found.append(rf"(.*\.)?({'|'.join(HEARS)})\..*")
    if peft_config.target_modules == "all-linear":
        for name, module in model.named_modules():
            kind = type(module)
            if isinstance(module, torch.nn.Linear) and kind.__module__.startswith("transformers.models."):
                found += [re.escape(name)] if "forward" in vars(kind) else []
    elif not isinstance(peft_config.target_modules, str):
        for name, module in model.named_modules():
            named = name.rpartition(".")[2] in (peft_config.target_modules or ())
            if named and isinstance(getattr(module, "linear", None), torch.nn.Linear):
                found.append(re.escape(name))
    return found


def check_lora_config(peft_config: Any) -> None:
    """Raise a ValueError unless the configuration is a LoRA that only adds to the base."""
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
            f"init_lora_weights is {start!r}, which changes the base's weights too, so that the saved adapter would "
            f"fit another base than the checkpoint: choose one of {', '.join(str(s) for s in PLAIN_STARTS)}."
        )
    for name in UNSUPPORTED:
        if getattr(peft_config, name, None):
            raise ValueError(f"The LoRA configuration sets {name}, which can't be published to vLLM: remove it.")


def describe_adapter(model: Any) -> Adapter:
    """Check and describe the adapter of a PeftModel.

    Raises:
        ValueError: the adapter can't be trained or published.
    """
    if len(model.active_adapters) != 1 or len(model.peft_config) != 1:
        raise ValueError(
            f"The PeftModel has the adapters {', '.join(model.peft_config)} ({len(model.active_adapters)} active), but "
            "exactly one is trained: delete the others (delete_adapter)."
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
    trained_base = _trained_base(model)
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
        f"a LoRA on what sees ({', '.join(seeing[:2])})": bool(seeing),
        f"rank {rank}, over {LARGEST_RANK}": rank > LARGEST_RANK,
    }
    why = ", ".join(reason for reason, applies in unserved.items() if applies)
    targets = tuple(sorted({layer.name.rpartition(".")[2] for layer in layers}))
    return Adapter(name, rank, targets, f"vLLM doesn't serve {why}" if why else "")


def _trained_base(model: Any) -> list[str]:
    """Return names of trainable parameters of the base; raise a ValueError unless peft saves them (biases)."""
    trained = [n for name, p in model.named_parameters() if p.requires_grad and (n := base_name(name)) is not None]
    (config,) = model.peft_config.values()
    for name in trained:
        if config.bias == "none" or not name.endswith(".bias"):
            raise ValueError(
                f"The base's {name} is trainable, but peft saves only the adapter: freeze it (requires_grad_(False)), "
                "or name its module in modules_to_save."
            )
    return trained


def _check_head(model: Any, layers: list[AdaptedLayer]) -> None:
    """Raise a ValueError for an adapter on the language-model head, or on an embedding that is also the head."""
    inner = unwrap(model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    if any(layer.module is head for layer in layers):
        raise ValueError(
            "The LoRA adapts the language-model head, whose logits are computed in tiles from its weight: take it out "
            "of lora_target_modules (or train it whole: lora_modules_to_save)."
        )
    tied = bool(getattr(inner.config.get_text_config(), "tie_word_embeddings", False))
    ends = tuple(f"{name}." for name, module in inner.named_modules() if module is head or module is embedding)
    changed = [layer.name for layer in layers if layer.module is embedding]
    changed += [name for name, _ in trained_copies(model) if name.startswith(ends)]
    if tied and changed:
        raise ValueError(
            f"The adapter changes {changed[0]}, but embedding and head are one tensor in this model (and in vLLM): "
            "take it out of lora_target_modules and lora_modules_to_save."
        )


def adapter_folder(path: str) -> dict[str, Any] | None:
    """Read the ``adapter_config.json`` of a folder that holds an adapter and no model; None for any other path."""
    file = os.path.join(path, "adapter_config.json")
    if not os.path.isfile(file) or os.path.isfile(os.path.join(path, "config.json")):
        return None
    with open(file, encoding="utf-8") as stream:
        return dict(json.load(stream))


# -- a bfloat16 layer's input, saved once for the backward of its float32 adapters
#
# peft casts a layer's input to the adapter's dtype before the product with A. Autograd then saves one float32 copy each
# for queries, keys and values. Here the product saves the uncast input, which all of them share, and casts it again for
# A's gradient. The numbers are the same.


def keep_inputs_as_they_are(model: torch.nn.Module) -> None:
    """Save uncast inputs for each LoRA on a linear layer, except with dropout or DoRA: these use the cast input."""
    for layer in model.modules():
        inputs: Any = getattr(layer, "lora_A", None)
        if not inputs or getattr(layer, "lora_variant", None) or not hasattr(layer, "cast_input_dtype_enabled"):
            continue
        if all(type(a) is torch.nn.Linear for a in inputs.values()) and not any(
            map(_drops, layer.lora_dropout.values())
        ):
            layer.cast_input_dtype_enabled = False
            for a in inputs.values():
                a.forward = types.MethodType(_product, a)  # a method, so that a copy of the model has its own


def _drops(dropout: torch.nn.Module) -> bool:
    return not isinstance(dropout, torch.nn.Identity) and getattr(dropout, "p", 1.0) > 0


def _product(a: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Compute A x, (..., rank), in A's dtype or autocast's."""
    if x.dtype == a.weight.dtype or a.bias is not None or autocast_dtype(x.device) is not None:
        return F.linear(x.to(a.weight.dtype), a.weight, a.bias)
    found: torch.Tensor = _CastProduct.apply(x, a.weight)
    return found


class _CastProduct(torch.autograd.Function):
    """Product W x with x cast to W's dtype, once for the forward and once more for the gradient of W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = (gradient @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_x, None
        return to_x, gradient.flatten(0, -2).t() @ x.flatten(0, -2).to(weight.dtype)

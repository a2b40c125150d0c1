"""Checks of a model's configuration: whether the model can be trained with the run's settings."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..config import GRPOConfig
from ..runtime import registry
from ..runtime.hub import check_model_name
from ..runtime.sizes import num_experts
from .lora import adapter_folder, is_adapted, unwrap
from .towers import TEXT_FIRST, takes_images

BASE_QUANTIZATION = "base_quantization.json"  # File in an adapter's folder with the quantisation of the base model.


@dataclass(frozen=True, slots=True)
class Wanted:
    """Description of a run's policy or teacher for `ModelFeature.check`. A model given by name isn't loaded yet."""

    model_config: Any  # Configuration of the model, or of an adapter's base. None: it can't be read.
    config: GRPOConfig
    name: str | None  # Name or folder of the model or adapter. None: the user passed a model object.
    has_adapter: bool
    has_images: bool


def check_installed(wanted: Wanted) -> None:
    model_config, given = wanted.model_config, dict(wanted.config.model_init_kwargs or {})  # type: ignore[arg-type]
    if model_config is None:
        return
    kind = model_config.model_type
    quantized = any(given.get(name) for name in ("quantization_config", "load_in_4bit", "load_in_8bit"))
    quantized = quantized or getattr(model_config, "quantization_config", None) is not None
    quantized = quantized or (wanted.name is not None and Path(wanted.name, BASE_QUANTIZATION).is_file())
    in_run = takes_images(model_config) and (wanted.has_images or kind not in TEXT_FIRST)
    for extension, is_one, words in (
        ("experts", num_experts(model_config), "a mixture of experts"),
        ("images", in_run, "a model that reads images"),
        ("quantized", quantized, "on a quantised base"),
    ):
        if is_one:
            registry.require(extension, f"{kind}, {words},", "choose a different model")


class ModelFeature:
    """Base class of an extension's checks of models, and of changes to a model while the model is loaded.

    An argument ``model`` is the transformers model, never a PeftModel around it. An extension lists a derived class
    under "model_feature" in its `HOOKS`.
    """

    def check(self, wanted: Wanted) -> None:
        """Raise a ValueError if the model can't be trained with the run's settings."""

    def check_split(self, model_config: Any, ranks: int) -> None:
        """Raise a ValueError if the model can't be split over an engine's ``ranks`` ranks."""

    def can_be_cut(self, model_config: Any) -> bool:
        """Return whether the policy can be stored in vLLM's tensor-parallel layout (each rank with its shards)."""
        return False

    def load_arguments(self, saved_config: Any, config: GRPOConfig, name: str) -> dict[str, Any]:
        """Return additional arguments of `from_pretrained`. ``name`` is the name of the model or of its adapter."""
        return {}

    def on_read(self, model: Any) -> None:
        """Change the model right after its weights have been read from a checkpoint."""

    def on_load(self, model: Any, path: str, config: GRPOConfig) -> None:
        """Change the loaded model of the checkpoint at ``path``, before this run adds a new adapter."""

    def processor(self, model: Any, path: str, given: Any, config: GRPOConfig) -> Any:
        """Return the processor of a model that reads images in this run, else None. ``given``: `processing_class`."""
        return None

    def why_rows_stay_whole(self, model: Any) -> str:
        """Return the reason why the tokens of one row can't be divided among ranks (sequence parallel), or ""."""
        return ""

    def check_adapter(self, policy: Any, folder: str) -> None:
        """Raise a ValueError if the adapter in ``folder`` was trained on a base model unlike the policy's."""

    def notes(self, policy: Any, config: GRPOConfig) -> Iterator[str]:
        """Yield lines about ``policy``, a `loading.Policy`, that are printed at the start of a run."""
        yield from ()


@functools.cache
def features() -> tuple[ModelFeature, ...]:
    return tuple(kind() for kind in registry.hooks("model_feature"))


def check_supported(model: Any, config: GRPOConfig, peft_config: Any = None, has_images: bool = False) -> None:
    by_name = isinstance(model, str | os.PathLike)
    if by_name:
        given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
        saved = adapter_folder(str(model))
        path, has_adapter = str((saved or {}).get("base_model_name_or_path") or model), saved is not None
        check_model_name(path, revision=given.get("revision"))
        model_config = read_config(path, config)
        if model_config is not None and "router_jitter_noise" in given:
            model_config.router_jitter_noise = given["router_jitter_noise"]
    else:
        model_config, has_adapter = getattr(unwrap(model), "config", None), is_adapted(model)
    has_adapter = has_adapter or peft_config is not None
    wanted = Wanted(model_config, config, str(model) if by_name else None, has_adapter, has_images)
    check_installed(wanted)
    for feature in features():
        feature.check(wanted)
    text = None if model_config is None else model_config.get_text_config()
    if (seen := getattr(text, "use_bidirectional_attention", None)) in (True, "all"):
        raise ValueError(
            f"The configuration of {model_config.model_type} has `use_bidirectional_attention` {seen!r}: a token "
            "attends to later tokens, so completions can't be sampled token by token. Choose a different model."
        )


def check_planned(model_config: Any, ranks: int) -> None:
    """Raise a ValueError if the model of a memory plan can't be split over ``ranks`` tensor-parallel ranks."""
    for feature in features():
        feature.check_split(model_config, ranks)


def check_shared_rows(model: Any, size: int, why_padded: str) -> None:
    if size > 1 and (reason := why_rows_stay_whole(model, why_padded)):
        raise ValueError(
            f"sequence_parallel_size is {size}, but {reason}, so ranks can't divide a row's tokens: set "
            "sequence_parallel_size to 1."
        )


def why_rows_stay_whole(model: Any, why_padded: str) -> str:
    """Return the reason why the tokens of one row can't be divided among ranks, or ""."""
    inner = unwrap(model)
    if why_padded:
        return f"rows of {type(inner).__name__} are padded ({why_padded})"
    return next(filter(None, (feature.why_rows_stay_whole(inner) for feature in features())), "")


def read_config(path: str, config: GRPOConfig) -> Any:
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    trust = given.get("trust_remote_code", config.trust_remote_code)
    try:
        return AutoConfig.from_pretrained(path, revision=given.get("revision"), trust_remote_code=trust)
    except (OSError, ValueError):
        return None

"""What options change where a model is checked and loaded (`ModelFeature`), and the checks from its configuration.

The checks run before weights are read.
"""

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

BASE_QUANTIZATION = "base_quantization.json"  # in a saved adapter's folder: its base must be loaded in the same way


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run's model before its weights are read."""

    model_config: Any  # of the model or of an adapter's base; None: it can't be read, and loading will raise the error
    config: GRPOConfig
    name: str | None  # of the model or adapter to load; None: the model is an object
    has_adapter: bool
    has_images: bool  # whether the run has images, see `towers.TEXT_FIRST`


def check_installed(wanted: Wanted) -> None:
    """Raise a ValueError if the extension for the model's kind is missing: without it the model would be another."""
    model_config, given = wanted.model_config, dict(wanted.config.model_init_kwargs or {})  # type: ignore[arg-type]
    if model_config is None:
        return
    kind, in_run = model_config.model_type, wanted.has_images or model_config.model_type not in TEXT_FIRST
    asked = any(given.get(name) for name in ("quantization_config", "load_in_4bit", "load_in_8bit"))
    packed = asked or getattr(model_config, "quantization_config", None) is not None
    beside = wanted.name is not None and Path(wanted.name, BASE_QUANTIZATION).is_file()
    for extension, is_one, words in (
        ("experts", num_experts(model_config), "a mixture of experts"),
        ("images", takes_images(model_config) and in_run, "a model that reads images"),
        ("quantized", packed or beside, "on a quantised base"),
    ):
        if is_one:
            registry.require(extension, f"{kind}, {words},", "choose another model")


class ModelFeature:
    """What an extension changes where a model is checked and loaded: nothing, unless it overrides a method.

    Extensions offer derived classes at the seam "model_feature". A model is a transformers model, without an adapter
    around it. The methods are called in the order below.
    """

    def check(self, wanted: Wanted) -> None:
        """Raise a ValueError if the model can't be trained with the run's settings."""

    def check_split(self, model_config: Any, ranks: int) -> None:
        """Raise a ValueError if ``ranks`` ranks can't share an engine of the model."""

    def can_be_cut(self, model_config: Any) -> bool:
        """Return whether the policy can lie in the engine's tensor-parallel layout."""
        return False

    def load_arguments(self, saved_config: Any, config: GRPOConfig, name: str) -> dict[str, Any]:
        """Return arguments of `from_pretrained`. ``name`` is that of the model, or of an adapter on it."""
        return {}

    def on_read(self, model: Any) -> None:
        """Change a model whose weights have just been read from a checkpoint."""

    def on_load(self, model: Any, path: str, config: GRPOConfig) -> None:
        """Change a model of the checkpoint at ``path``, before an adapter is put around it."""

    def processor(self, model: Any, path: str, given: Any, config: GRPOConfig) -> Any:
        """Return the processor of a model that reads more than text. ``given`` is the user's, a tokenizer, or None."""
        return None

    def why_rows_stay_whole(self, model: Any) -> str:
        """Return why ranks can't share out a row's tokens; empty: they can."""
        return ""

    def check_adapter(self, policy: Any, folder: str) -> None:
        """Raise a ValueError if the adapter in a checkpoint's folder was trained on another base."""

    def notes(self, policy: Any, config: GRPOConfig) -> Iterator[str]:
        """Yield lines about a `loading.Policy` for the user at start."""
        yield from ()


@functools.cache
def features() -> tuple[ModelFeature, ...]:
    """Return what the installed extensions offer."""
    return tuple(kind() for kind in registry.hooks("model_feature"))


def check_supported(model: Any, config: GRPOConfig, peft_config: Any = None, has_images: bool = False) -> None:
    """Raise a ValueError if a model (name or object) can't be trained, or not with the run's settings.

    ``peft_config`` is the new adapter's; None: no new adapter.
    """
    by_name, model_config = isinstance(model, str | os.PathLike), _configuration(model, config)
    has_adapter = peft_config is not None or (adapter_folder(str(model)) is not None if by_name else is_adapted(model))
    wanted = Wanted(model_config, config, str(model) if by_name else None, has_adapter, has_images)
    check_installed(wanted)
    for feature in features():
        feature.check(wanted)
    text = None if model_config is None else model_config.get_text_config()
    if (seen := getattr(text, "use_bidirectional_attention", None)) in (True, "all"):
        raise ValueError(
            f"{model_config.model_type} has use_bidirectional_attention {seen!r}: its tokens see later ones, and can't "
            "be sampled one after the other. Choose another model."
        )


def check_planned(model_config: Any, ranks: int) -> None:
    """Run the checks of `check_supported` that a memory plan needs; ``ranks`` share an engine."""
    for feature in features():
        feature.check_split(model_config, ranks)


def can_be_cut(model_config: Any) -> bool:
    """Return whether a policy of this configuration can lie in the engine's tensor-parallel layout."""
    return any(feature.can_be_cut(model_config) for feature in features())


def check_shared_rows(model: Any, size: int, why_padded: str) -> None:
    """Raise a ValueError if ``size`` ranks share out the tokens of rows, but the model's rows can't be cut."""
    if size > 1 and (reason := why_rows_stay_whole(model, why_padded)):
        raise ValueError(
            f"sequence_parallel_size is {size}, but {reason}, which ranks can't share out in this version: set it to 1."
        )


def why_rows_stay_whole(model: Any, why_padded: str) -> str:
    """Return why ranks can't share out a row's tokens, from the model's modules and configuration; empty: they can."""
    inner = unwrap(model)
    if why_padded:
        return f"rows of {type(inner).__name__} are padded ({why_padded})"
    return next(filter(None, (feature.why_rows_stay_whole(inner) for feature in features())), "")


def _configuration(model: Any, config: GRPOConfig) -> Any:
    """Return the configuration of the model or of an adapter's base; None: it can't be read."""
    if not isinstance(model, str | os.PathLike):
        return getattr(unwrap(model), "config", None)
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    path = str((adapter_folder(str(model)) or {}).get("base_model_name_or_path") or model)
    check_model_name(path, revision=given.get("revision"))
    model_config = read_config(path, config)
    if model_config is not None and "router_jitter_noise" in given:
        model_config.router_jitter_noise = given["router_jitter_noise"]
    return model_config


def read_config(path: str, config: GRPOConfig) -> Any:
    """Read the configuration of the model at ``path`` with the run's revision and trust; None: it can't be read."""
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    trust = given.get("trust_remote_code", config.trust_remote_code)
    try:
        return AutoConfig.from_pretrained(path, revision=given.get("revision"), trust_remote_code=trust)
    except (OSError, ValueError):
        return None

"""Quantised base models (QLoRA, arXiv 2305.14314): check, load and record their settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...config import GRPOConfig
from ...policy.lora import packed_weights
from ...policy.supported import BASE_QUANTIZATION, ModelFeature, Wanted, read_config
from .layers import is_4bit, settle

if TYPE_CHECKING:
    from ...policy.loading import Policy

METHOD = "bitsandbytes"


@dataclass(frozen=True, slots=True)
class Quantization:
    settings: Mapping[str, Any]  # `quantization_config`, as in a checkpoint's config.json.
    in_checkpoint: bool  # Whether the checkpoint's files are quantised. False: loading has quantised the weights.

    def write(self, folder: str | Path, dtype: torch.dtype) -> None:
        said = {"quantization_config": dict(self.settings), "dtype": str(dtype).removeprefix("torch.")}
        Path(folder, BASE_QUANTIZATION).write_text(json.dumps(said, indent=2) + "\n")


def beside(folder: str | Path) -> tuple[dict[str, Any], torch.dtype] | None:
    """Read the settings and dtype that `Quantization.write` recorded in a saved adapter's folder."""
    file = Path(folder, BASE_QUANTIZATION)
    if not file.is_file():
        return None
    said = json.loads(file.read_text())
    dtype: torch.dtype = getattr(torch, said["dtype"])
    return dict(said["quantization_config"]), dtype


def name_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("bnb_4bit_quant_type", "fp4")).upper() if is_4bit(settings) else "int8"


def asked_for(config: GRPOConfig, name: str) -> dict[str, Any] | None:
    """Return the quantisation settings of the run, else those recorded in an adapter's folder ``name``, else None."""
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    found: Any = given.get("quantization_config")
    flags = {name: True for name in ("load_in_4bit", "load_in_8bit") if given.get(name)}
    if found is None and not flags:
        return (beside(name) or (None,))[0]
    if found is not None and flags:
        raise ValueError(
            f"model_init_kwargs has quantization_config and {next(iter(flags))}, which is an old name for the same "
            "setting: keep only quantization_config."
        )
    settings = {"quant_method": METHOD, **(flags if found is None else _as_settings(found))}
    check_method(settings, "quantization_config")
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)]
    if len(bits) != 1:
        raise ValueError(
            f"The run requests a base of {'4 and 8 bits' if bits else 'neither 4 nor 8 bits'}: set either load_in_4bit "
            "or load_in_8bit."
        )
    if is_4bit(settings) and settings.get("bnb_4bit_compute_dtype") is None and config.policy_dtype != "auto":
        settings["bnb_4bit_compute_dtype"] = config.policy_dtype
    return settings


def take_quantization(arguments: Any, config: GRPOConfig) -> None:
    if (quantization_config := arguments.quantization_config) is None:
        return
    if not isinstance(arguments.model, str | os.PathLike):
        raise ValueError(
            "quantization_config is given, but the model is an object that is loaded already: remove "
            "quantization_config, or give the model's name."
        )
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    if given.get("quantization_config") is not None:
        raise ValueError("quantization_config is given to the trainer and in model_init_kwargs: remove one of the two.")
    config.resolve_loading(quantization_config=_as_settings(quantization_config))


def _as_settings(found: Any) -> dict[str, Any]:
    return dict(found if isinstance(found, Mapping) else found.to_dict())


def saved_in(model_config: Any) -> dict[str, Any] | None:
    found = getattr(model_config, "quantization_config", None)
    return None if found is None else _as_settings(found)


def settings_of(model_config: Any, config: GRPOConfig, name: str) -> dict[str, Any] | None:
    return saved_in(model_config) or asked_for(config, name)


def check_method(settings: Mapping[str, Any], where: str) -> None:
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method == "mxfp4":
        raise ValueError(
            f"{where} has quant_method 'mxfp4', as gpt-oss is published, but Colograd can't train MXFP4: write a copy "
            "in bfloat16 with AutoModelForCausalLM.from_pretrained(NAME, quantization_config="
            'Mxfp4Config(dequantize=True), dtype="bfloat16").save_pretrained(FOLDER, save_original_format=False) and '
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER). Then train the model in FOLDER."
        )
    if method != METHOD:
        raise ValueError(
            f"{where} has quant_method {method!r}, but a quantised base must be of {METHOD} (4 or 8 bits): take the "
            "bfloat16 checkpoint of the model, and quantise it with load_in_4bit: true, or train an adapter on it "
            "without quantisation."
        )
    if settings.get("llm_int8_has_fp16_weight"):
        raise ValueError(
            f"{where} sets llm_int8_has_fp16_weight, which quantises the policy's weights anew in each forward. The "
            "engine's weights would differ from the policy's: remove llm_int8_has_fp16_weight."
        )


def load_arguments(settings: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Return arguments of `from_pretrained`. ``settings`` None: keep the quantisation of the checkpoint's weights."""
    from transformers import BitsAndBytesConfig

    asked = {} if settings is None else {"quantization_config": BitsAndBytesConfig.from_dict(dict(settings))}
    return {"device_map": {"": str(device)}, **asked}


class Quantized(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        config = wanted.config
        saved, asked = saved_in(wanted.model_config), None if wanted.name is None else asked_for(config, wanted.name)
        if saved is not None:
            check_method(saved, "The model's configuration")
        if saved is not None and asked is not None and is_4bit(saved) != is_4bit(asked):
            raise ValueError(
                f"The run requests {name_of(asked)}, but the checkpoint's weights are quantised to {name_of(saved)} "
                "already: remove load_in_4bit, load_in_8bit and quantization_config, or take the checkpoint in "
                "bfloat16."
            )
        settings = saved or asked
        if settings is None:
            return
        if not wanted.has_adapter:
            bits = "4" if is_4bit(settings) else "8"
            raise ValueError(
                f"The base is quantised to {bits} bits, but quantised weights can't be trained: set use_peft: true (or "
                "give peft_config) to train an adapter on the base, or load the model without quantisation."
            )
        if config.torch_compile:
            raise ValueError(
                "torch_compile is true, but layers with quantised weights aren't compiled in this version: remove "
                "torch_compile."
            )
        if config.tensor_parallel:
            raise ValueError(
                f"sharding is {config.sharding!r}, but the base is quantised, and this version can't divide quantised "
                "weights among an engine's ranks: set sharding: gradients, or load the model without quantisation."
            )
        try:
            import bitsandbytes.functional  # noqa: F401  # `import bitsandbytes` may work without its native library.
        except ImportError as error:
            raise ValueError(
                f"A quantised base needs bitsandbytes, which can't be imported ({error}): pip install bitsandbytes."
            ) from None

    def load_arguments(self, saved_config: Any, config: GRPOConfig, name: str) -> dict[str, Any]:
        asked, packed = asked_for(config, name), saved_in(saved_config) is not None
        return load_arguments(None if packed else asked, config.device) if packed or asked is not None else {}

    def on_load(self, model: Any, path: str, config: GRPOConfig) -> None:
        if not packed_weights(model):
            return
        settle(model)
        on_disk = saved_in(read_config(path, config))
        model.quantization = Quantization(saved_in(model.config) or {}, on_disk is not None)

    def check_adapter(self, policy: Policy, folder: str) -> None:
        both = (beside(folder) or [None])[0], policy.quantization and policy.quantization.settings
        then, now = (f"quantised to {name_of(each)}" if each else "without quantisation" for each in both)
        if then != now:
            raise ValueError(
                f"{folder!r} has an adapter that was trained on a base {then}, but this run's base is {now}: set "
                "load_in_4bit, load_in_8bit and bnb_4bit_quant_type as in the run that trained the adapter."
            )

    def notes(self, policy: Policy, config: GRPOConfig) -> Iterator[str]:
        if policy.quantization is not None:
            packed = packed_weights(policy.model).values()
            size = sum(weight.nbytes for weight in packed) / 2**20
            yield f"base: {len(packed)} matrices quantised to {name_of(policy.quantization.settings)}, {size:,.1f} MiB"

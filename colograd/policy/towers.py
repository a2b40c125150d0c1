"""Models that read images or audio: model types, names of vision and audio modules, and the parts that are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Model types that can be trained on images.
FAMILIES = ("gemma3", "gemma4", "idefics3", "internvl", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm")
TEXT_FIRST = ("gemma4", "internvl", "mistral3", "qwen3_5")  # Model types trained on text alone in runs without images.
TOWERS = ("visual", "vision_model", "vision_tower")  # Names of vision modules.
PROJECTORS = ("merger", "deepstack_merger_list", "connector", "multi_modal_projector", "embed_vision")
HEARS = ("audio_tower", "embed_audio")  # Names of audio modules.


def takes_images(model_config: Any) -> bool:
    return getattr(model_config, "model_type", None) in FAMILIES


def has_tower(model_config: Any) -> bool:
    return any(getattr(model_config, name, None) is not None for name in ("vision_config", "audio_config"))


def reads_text_alone(model: Any) -> bool:
    config = getattr(model, "config", None)
    return has_tower(config) and (not takes_images(config) or getattr(model, "text_alone", False))


def set_text_alone(model: Any, has_images: bool) -> None:
    model.text_alone = not has_images and getattr(model.config, "model_type", None) in TEXT_FIRST


def read_parameters(model: Any) -> set[int] | None:
    """Return ``id(parameter)`` of all parameters that forwards of the run may use. None means all parameters."""
    if reads_text_alone(model):
        head = model.get_output_embeddings()
        return {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    if not hears(getattr(model, "config", None)):
        return None
    return {id(parameter) for name, parameter in model.named_parameters() if not {*name.split(".")} & {*HEARS}}


def hears(model_config: Any) -> bool:
    return getattr(model_config, "audio_config", None) is not None


def freeze_unread(model: Any) -> None:
    read = read_parameters(model)
    for parameter in model.parameters():
        if read is not None and id(parameter) not in read:
            parameter.requires_grad_(False)


def keep_gradients_out(layers: Sequence[torch.nn.Module]) -> None:
    """Make the first of the frozen ``layers`` detach its inputs, so that no backward runs through the layers.

    Activation checkpointing may have made these inputs require gradients.
    """

    def detach(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in inputs)

    if layers:
        layers[0].register_forward_pre_hook(detach)


def in_tower(name: str) -> bool:
    """Return whether a parameter or module belongs to a vision tower (without its projector)."""
    parts = {*name.split(".")}
    return bool(parts & {*TOWERS}) and not parts & {*PROJECTORS}


def sees(name: str) -> bool:
    """Return whether a parameter or module belongs to a vision tower or to its projector."""
    return bool({*name.split(".")} & {*TOWERS, *PROJECTORS})


def tower_layers(model: Any) -> list[torch.nn.Module]:
    if not takes_images(model.config):
        return []
    modules = (module for name, module in model.named_modules() if in_tower(name))
    return list(max((each for each in modules if isinstance(each, torch.nn.ModuleList)), key=len, default=()))

"""Models that read more than text: which they are, the names of their parts, and what of them a run trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# transformers' model types that can be trained on images.
FAMILIES = ("gemma3", "gemma4", "idefics3", "internvl", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm")
TEXT_FIRST = ("gemma4", "internvl", "mistral3", "qwen3_5")  # families trained like text models in a run without images
TOWERS = ("visual", "vision_model", "vision_tower")  # vision towers; the projectors map their features to text space
PROJECTORS = ("merger", "deepstack_merger_list", "connector", "multi_modal_projector", "embed_vision")
HEARS = ("audio_tower", "embed_audio")  # audio towers: neither trained nor in the engine


def takes_images(model_config: Any) -> bool:
    return getattr(model_config, "model_type", None) in FAMILIES


def has_tower(model_config: Any) -> bool:
    """Return whether the model reads images or audio."""
    return any(getattr(model_config, name, None) is not None for name in ("vision_config", "audio_config"))


def reads_text_alone(model: Any) -> bool:
    """Return whether a model that could read more than text is trained on text alone.

    That is a model outside `FAMILIES`, or one of `TEXT_FIRST` in a run without images (`set_text_alone`).
    """
    config = getattr(model, "config", None)
    return has_tower(config) and (not takes_images(config) or getattr(model, "text_alone", False))


def set_text_alone(model: Any, has_images: bool) -> None:
    """Record before training that a model of `TEXT_FIRST` is trained on text alone if the run has no images."""
    model.text_alone = not has_images and getattr(model.config, "model_type", None) in TEXT_FIRST


def read_parameters(model: Any) -> set[int] | None:
    """Return the ids of the parameters that the run's rows use; None: the rows use all parameters."""
    if reads_text_alone(model):
        head = model.get_output_embeddings()
        return {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    if not hears(getattr(model, "config", None)):
        return None
    return {id(parameter) for name, parameter in model.named_parameters() if not {*name.split(".")} & {*HEARS}}


def hears(model_config: Any) -> bool:
    return getattr(model_config, "audio_config", None) is not None


def freeze_unread(model: Any) -> None:
    """Freeze the parameters that no row uses."""
    read = read_parameters(model)
    for parameter in model.parameters():
        if read is not None and id(parameter) not in read:
            parameter.requires_grad_(False)


def keep_gradients_out(layers: Sequence[torch.nn.Module]) -> None:
    """Stop gradients before frozen layers, even if checkpointing has made their inputs require gradients."""

    def detach(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in inputs)

    if layers:
        layers[0].register_forward_pre_hook(detach)


def in_tower(name: str) -> bool:
    """Return whether a parameter of that name belongs to the vision tower."""
    parts = {*name.split(".")}
    return bool(parts & {*TOWERS}) and not parts & {*PROJECTORS}


def sees(name: str) -> bool:
    """Return whether a parameter of that name belongs to the vision tower or its projector."""
    return bool({*name.split(".")} & {*TOWERS, *PROJECTORS})


def tower_layers(model: Any) -> list[torch.nn.Module]:
    """Return the vision tower's layers; empty: the model has no vision tower."""
    if not takes_images(model.config):
        return []
    modules = (module for name, module in model.named_modules() if in_tower(name))
    return list(max((each for each in modules if isinstance(each, torch.nn.ModuleList)), key=len, default=()))

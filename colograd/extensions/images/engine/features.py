"""Prompts with images for vLLM. They have one placeholder token per image, which vLLM expands to image tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....batch import ModelInput
from ....config import GRPOConfig
from ....engine.protocol import EngineFeature, EngineUse, Sampled
from ....policy.lora import unwrap
from ....policy.towers import has_tower, reads_text_alone
from ..rider import STAND_IN
from ..towers import see_both_ways


class ImagePrompts(EngineFeature):
    """Engine feature for up to ``most`` images per request (0: no limit). ``whole``: no engine step splits an image."""

    def __init__(self, most: int, on_cpu: bool, whole: bool, processor: Any) -> None:
        self.most, self.on_cpu, self.whole, self.processor = most, on_cpu, whole, processor

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        find_gemma3()  # register Gemma 3 before vLLM imports its class
        most = {"image": self.most or arguments["max_model_len"], "video": 0, "audio": 0}  # at most one image per token
        whole = {"disable_chunked_mm_input": True} if self.whole else {}  # vLLM sets this option itself only on GPUs
        return {"limit_mm_per_prompt": arguments.get("limit_mm_per_prompt", most), **whole}

    def while_built(self) -> contextlib.AbstractContextManager[Any]:
        whole_of_known_features()
        if not self.on_cpu:
            return contextlib.nullcontext()
        from .bidirectional import both_ways

        return both_ways()

    def built(self, engine: Any) -> None:
        self.core = engine.core
        model_config = self.core.vllm_config.model_config
        if self.on_cpu and getattr(model_config, "is_mm_prefix_lm", False):
            from vllm.v1.attention.backend import CommonAttentionMetadata

            if "mm_req_doc_ranges" not in {field.name for field in dataclasses.fields(CommonAttentionMetadata)}:
                from vllm import __version__

                raise RuntimeError(
                    f"This model has bidirectional attention within an image, but vLLM {__version__} on a CPU doesn't "
                    "support it: install vLLM 0.31, or train the model on a GPU."
                )
        _check_same_processor(model_config, self.processor)

    def request(self, prompt: ModelInput) -> Any:
        return None if prompt.images is None else prompt_with_images(self.core, prompt)

    def completions(self, request: str, prompt: ModelInput, output: Any, sampled: list[Sampled]) -> list[Sampled]:
        check_expanded(prompt, output.prompt_token_ids)
        return sampled

    def scored(self, prompt: ModelInput, output: Any) -> None:
        if prompt.images is not None:
            check_expanded(prompt, output.prompt_token_ids)
            self.forget()

    def forget(self) -> None:
        """Drop vLLM's cached image features, which depend on the weights. Processed pixels stay cached."""
        self.core.reset_encoder_cache()


class TextAlone(EngineFeature):
    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"language_model_only": True}


def towers_of(config: GRPOConfig, use: EngineUse) -> EngineFeature | None:
    if use.policy is None:
        return TextAlone() if has_tower(use.model_config) else None
    if use.policy.processor is None:
        return TextAlone() if reads_text_alone(unwrap(use.policy.model)) else None
    from ..data import most_images

    most = 0 if use.has_tools else max(1, *map(most_images, use.prompts))
    whole = bool(see_both_ways(unwrap(use.policy.model).config))
    return ImagePrompts(most, config.on_cpu, whole, use.policy.processor)


def find_gemma3() -> None:
    """Register vLLM's Gemma 3 if torchvision is missing. vLLM's module needs torchvision only for type annotations."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm.model_executor.models import ModelRegistry

    package, architecture = "transformers.models.gemma3", "Gemma3ForConditionalGeneration"
    pil = importlib.import_module(f"{package}.image_processing_pil_gemma3")
    named = types.ModuleType(f"{package}.image_processing_gemma3")
    named.Gemma3ImageProcessor = pil.Gemma3ImageProcessorPil  # type: ignore[attr-defined]
    sys.modules[named.__name__] = named
    try:
        found = importlib.import_module("vllm.model_executor.models.gemma3_mm")
    finally:
        del sys.modules[named.__name__]
    # Otherwise vLLM would import the class in a subprocess, where the import fails.
    ModelRegistry.register_model(architecture, getattr(found, architecture))


def prompt_with_images(core: Any, asked: ModelInput) -> Any:
    """Return a prompt for vLLM. If `STAND_IN` replaced some of its tokens, expand its images and restore the tokens."""
    images = asked.images
    assert images is not None and images.pictures, "the pictures of a prompt stay on the rank that samples it"
    prompt: Any = {"prompt_token_ids": list(images.engine_ids), "multi_modal_data": {"image": list(images.pictures)}}
    if images.engine_ids.count(STAND_IN) == asked.ids.count(STAND_IN):
        return prompt
    rendered = core.renderer.render_cmpl([prompt])[0]
    expanded = list(rendered["prompt_token_ids"])
    if len(expanded) == len(asked):
        places = {*images.places}
        for at, token in enumerate(asked.ids):
            if token == images.placeholder and at not in places and expanded[at] == STAND_IN:
                expanded[at] = token
    check_expanded(asked, expanded)
    return {**rendered, "prompt_token_ids": expanded}


def check_expanded(asked: ModelInput, found: Sequence[int]) -> None:
    """Raise a RuntimeError if vLLM's tokens of an image prompt, ``found``, differ from the trainer's."""
    if asked.images is None or tuple(found) == asked.ids:
        return
    token = asked.ids[asked.images.places[0]]
    raise RuntimeError(
        f"vLLM read {len(found)} prompt tokens ({list(found).count(token)} image tokens), but the "
        f"trainer's row has {len(asked.ids)} tokens with {len(asked.images.places)} image tokens. The completion would "
        "be trained with another prompt than it was sampled with. Use the processor that was saved with the model, and "
        "the version of transformers that fits vLLM."
    )


def _check_same_processor(model_config: Any, processor: Any) -> None:
    from vllm.transformers_utils.processor import cached_processor_from_config

    # Without `processor_cls` vLLM would load its own processor class for some models, such as InternVL.
    theirs = cached_processor_from_config(model_config, processor_cls=type(processor)).image_processor.to_dict()
    ours = processor.image_processor.to_dict()
    for name in sorted(theirs.keys() | ours.keys()):
        if _plain(theirs.get(name)) != _plain(ours.get(name)):
            raise ValueError(
                f"The processor's {name} is {ours.get(name)!r}, but vLLM, which loads the processor from the model's "
                f"folder, has {theirs.get(name)!r}: save the processor into that folder, or give no processing_class."
            )
    counted = getattr(getattr(model_config.hf_config, "vision_config", None), "default_output_length", None)
    most = ours.get("max_soft_tokens")
    if None not in (counted, most) and counted != most:
        raise ValueError(
            f"The processor's max_soft_tokens is {most}, but vLLM counts an image's tokens by the model's "
            f"vision_config.default_output_length, which is {counted}: make both values equal in the model's folder."
        )


def _plain(value: Any) -> Any:
    """Convert a processor's setting into dicts and lists, so that equal settings of different classes are equal."""
    if hasattr(value, "items"):
        return {key: _plain(of) for key, of in value.items() if of is not None}
    return [*value] if isinstance(value, tuple) else value


def whole_of_known_features() -> None:
    """Patch vLLM's scheduler to obey disable_chunked_mm_input also for images whose features are cached."""
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs: Any = getattr(Scheduler, "_try_schedule_encoder_inputs", None)
    if theirs is None or hasattr(theirs, "cuts_none"):
        return

    @functools.wraps(theirs)
    def schedule(
        self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int, *others: Any, **named: Any
    ) -> Any:
        inputs, count, *rest = theirs(self, request, num_computed_tokens, num_new_tokens, *others, **named)
        if self.scheduler_config.disable_chunked_mm_input:
            places = [feature.mm_position for feature in request.mm_features]
            pictures = [(place.offset, place.offset + place.length) for place in places]
            count = up_to_a_picture(pictures, num_computed_tokens, count)
        return inputs, count, *rest

    schedule.cuts_none = True  # type: ignore[attr-defined]
    Scheduler._try_schedule_encoder_inputs = schedule


def up_to_a_picture(pictures: Iterable[tuple[int, int]], computed: int, count: int) -> int:
    """Reduce a step's ``count`` of tokens so that the step splits no image. ``pictures``: [first, end) per image."""
    for first, end in pictures:
        if first < computed + count < end:
            return max(0, first - computed)
    return count

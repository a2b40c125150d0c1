"""Images in vLLM: prompts with images, checks that vLLM reads them as the trainer does, and removal of old features.

vLLM gets the images, and a prompt with one placeholder per image. It replaces each placeholder by as many image tokens
as its own processor makes from the image.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....batch import ModelInput
from ....config import GRPOConfig
from ....engine.feature import BuiltEngine, EngineFeature, EngineUse
from ....engine.protocol import Sampled
from ....policy.lora import unwrap
from ....policy.towers import has_tower, reads_text_alone
from ..rider import STAND_IN


class ImagePrompts(EngineFeature):
    """Prompts with at most ``most`` images; 0: as many as the context has tokens, because each image needs one."""

    def __init__(self, most: int, on_cpu: bool) -> None:
        self.most, self.on_cpu = most, on_cpu

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        find_gemma3()  # its class is loaded before an engine is built
        name = "limit_mm_per_prompt"
        most = self.most or arguments["max_model_len"]
        return {} if name in arguments else {name: {"image": most, "video": 0, "audio": 0}}

    @contextlib.contextmanager
    def while_built(self) -> Iterator[None]:
        whole_of_known_features()
        if not self.on_cpu:
            yield
            return
        from .bidirectional import both_ways

        with both_ways(), whole_on_cpu():
            yield

    def built(self, engine: BuiltEngine) -> None:
        self.core = engine.core

    def check_processor(self, processor: Any) -> None:
        """Check that vLLM processes images like the trainer's ``processor``, and attends within them as the model."""
        model_config = self.core.vllm_config.model_config
        if self.on_cpu and getattr(model_config, "is_mm_prefix_lm", False):
            from vllm.v1.attention.backend import CommonAttentionMetadata

            if "mm_req_doc_ranges" not in {field.name for field in dataclasses.fields(CommonAttentionMetadata)}:
                from vllm import __version__

                raise RuntimeError(
                    f"This model's image tokens see each other both ways, but vLLM {__version__} on a CPU doesn't pass "
                    "their places to its attention: install vLLM 0.31, or train the model on a GPU."
                )
        _check_same_processor(model_config, processor)

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
        """Drop vLLM's image features, so that it encodes images anew. Processed pixels depend on no weights."""
        self.core.reset_encoder_cache()


class TextAlone(EngineFeature):
    """A model without its towers, because the run has text alone."""

    def arguments(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"language_model_only": True}


def towers_of(config: GRPOConfig, use: EngineUse) -> EngineFeature | None:
    """Offer `ImagePrompts`, or `TextAlone` for a run that doesn't use the model's towers."""
    if use.policy is None:
        return TextAlone() if has_tower(use.model_config) else None
    if use.policy.processor is None:
        return TextAlone() if reads_text_alone(unwrap(use.policy.model)) else None
    most = max(1, *(getattr(part, "most_images", 0) for part in use.prompts))
    return ImagePrompts(0 if use.has_tools else most, config.on_cpu)


def find_gemma3() -> None:
    """Register vLLM's class of Gemma 3 if torchvision isn't installed.

    Its module imports a processor that needs torchvision, but uses it only in annotations.
    """
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
    # vLLM inspects unregistered classes in another process, where the import would fail.
    ModelRegistry.register_model(architecture, getattr(found, architecture))


def prompt_with_images(core: Any, asked: ModelInput) -> Any:
    """Return a prompt with images in the form that `LLMEngine.add_request` takes.

    vLLM would read a placeholder token that the model or a tool wrote as an image. So `Images.engine_ids` has another
    token there. This function lets vLLM insert the image tokens, then restores the written placeholders.
    """
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
    """Raise a RuntimeError if vLLM read other tokens than the trainer's row has."""
    if asked.images is None or tuple(found) == asked.ids:
        return
    token = asked.ids[asked.images.places[0]]
    raise RuntimeError(
        f"vLLM read a prompt of {len(found)} tokens, {list(found).count(token)} of them image tokens, but the "
        f"trainer's row has {len(asked.ids)} tokens with {len(asked.images.places)} image tokens: their processors "
        "disagree about the images, and what is trained wouldn't be what was sampled. Use the processor that was saved "
        "with the model, and versions of vLLM and transformers that belong together."
    )


def _check_same_processor(model_config: Any, processor: Any) -> None:
    """Raise a ValueError if the image processors of vLLM and the trainer differ in a setting.

    Also raise it if vLLM counts an image's tokens by another setting of the model (Gemma 4).
    """
    from vllm.transformers_utils.processor import cached_processor_from_config

    # Pass the class: by name vLLM loads its own class for some models (InternVL), made for older checkpoints.
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
            f"vision_config.default_output_length, which is {counted}: make them equal in the model's folder."
        )


def _plain(value: Any) -> Any:
    """Convert a setting into dicts and lists, so that the class that holds it doesn't matter."""
    if hasattr(value, "items"):
        return {key: _plain(of) for key, of in value.items() if of is not None}
    return [*value] if isinstance(value, tuple) else value


@contextlib.contextmanager
def whole_on_cpu() -> Iterator[None]:
    """Never split an image over two steps of an engine on a CPU, if its tokens attend to each other both ways.

    vLLM itself never does on GPUs. The context applies to engines that are built in it. Other models stay unchanged,
    because vLLM would refuse a model if its largest image has more tokens than a step.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    theirs = platform.check_and_update_config

    def check(config: Any) -> None:
        theirs(config)
        if getattr(config.model_config, "is_mm_prefix_lm", False):
            config.scheduler_config.disable_chunked_mm_input = True

    platform.check_and_update_config = staticmethod(check)
    try:
        yield
    finally:
        platform.check_and_update_config = theirs


def whole_of_known_features() -> None:
    """Never split an image with cached features either, in engines of this process that don't split images."""
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
    """Return how many tokens to read next behind ``computed``: the scheduler's ``count``, or fewer to cut no image.

    ``pictures`` are first and last token + 1 of each image.
    """
    for first, end in pictures:
        if first < computed + count < end:
            return max(0, first - computed)
    return count

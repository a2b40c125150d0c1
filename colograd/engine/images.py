"""Images in vLLM: how a prompt with images is handed over, that it is read as the trainer reads it, and that nothing is
left of it when weights have changed.

vLLM gets the pictures and a prompt with one placeholder for each, and puts in as many image tokens as its own processor
makes of them. (A prompt that has them already would get them twice.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..batch import STAND_IN, ModelInput


def prompt_with_images(core: Any, asked: ModelInput) -> Any:
    """A prompt as `LLMEngine.add_request` takes it.

    vLLM takes any placeholder for a picture's. Where the model or a tool wrote one, another token stands in its place
    while vLLM puts in the pictures' tokens, and is put back here.

    Raises:
        RuntimeError: see `check_expanded`.
    """
    images = asked.images
    assert images is not None and images.pictures, "the pictures of a prompt stay on the rank that samples it"
    prompt: Any = {"prompt_token_ids": list(images.engine_ids), "multi_modal_data": {"image": list(images.pictures)}}
    written = _written_placeholders(asked)
    if not written:
        return prompt
    rendered = core.renderer.render_cmpl([prompt])[0]
    found = list(rendered["prompt_token_ids"])
    if len(found) == len(asked):
        for place in written:
            found[place] = asked.ids[place] if found[place] == STAND_IN else found[place]
    check_expanded(asked, found)
    return {**rendered, "prompt_token_ids": found}


def _written_placeholders(asked: ModelInput) -> list[int]:
    """The places of those that stand for no picture."""
    images = asked.images
    assert images is not None
    if images.engine_ids.count(STAND_IN) == asked.ids.count(STAND_IN):
        return []
    places = {*images.places}
    return [at for at, token in enumerate(asked.ids) if token == images.placeholder and at not in places]


def check_expanded(asked: ModelInput, found: Sequence[int]) -> None:
    """Whether vLLM read the very tokens that the trainer's row has.

    Raises:
        RuntimeError: it didn't, with both counts of image tokens.
    """
    if asked.images is None or tuple(found) == asked.ids:
        return
    token = asked.ids[asked.images.places[0]]
    raise RuntimeError(
        f"vLLM read a prompt of {len(found)} tokens, {list(found).count(token)} of them image tokens, but the "
        f"trainer's row has {len(asked.ids)} tokens with {len(asked.images.places)} image tokens: their processors "
        "disagree about the images, and what is trained wouldn't be what was sampled. Use the processor that was saved "
        "with the model, and versions of vLLM and transformers that belong together."
    )


def check_same_processor(model_config: Any, processor: Any) -> None:
    """Whether vLLM's image processor has the settings of the trainer's.

    Raises:
        ValueError: naming the first setting that differs.
    """
    from vllm.transformers_utils.processor import cached_processor_from_config

    theirs = cached_processor_from_config(model_config).image_processor.to_dict()
    ours = processor.image_processor.to_dict()
    for name in sorted(theirs.keys() | ours.keys()):
        if _plain(theirs.get(name)) != _plain(ours.get(name)):
            raise ValueError(
                f"The processor's {name} is {ours.get(name)!r}, but vLLM, which loads the processor from the model's "
                f"folder, has {theirs.get(name)!r}: save the processor into that folder, or give no processing_class."
            )


def _plain(value: Any) -> Any:
    """A setting, whichever class holds it."""
    if hasattr(value, "items"):
        return {key: _plain(of) for key, of in value.items() if of is not None}
    return [*value] if isinstance(value, tuple) else value


def check_forgets(core: Any) -> None:
    """
    Raises:
        RuntimeError: this vLLM keeps features of older weights.
    """
    if not hasattr(core, "reset_encoder_cache"):
        from vllm import __version__ as found

        raise RuntimeError(
            f"vLLM {found} can't forget the features of images, which older weights made: install vLLM 0.31."
        )


def forget_features(core: Any) -> None:
    """Let vLLM encode images anew. (What its processor made of them stays: pixels depend on no weights.)"""
    core.reset_encoder_cache()

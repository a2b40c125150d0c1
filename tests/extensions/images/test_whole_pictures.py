"""A picture whose tokens see each other is read in one step of the engine, even if other prompts show it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_images
import torch

from colograd.batch import ModelInput
from colograd.engine.vllm_engine import VLLMEngine
from colograd.extensions.images.data import ImageReader
from colograd.extensions.images.engine.features import ImagePrompts, up_to_a_picture


def test_a_part_of_a_prompt_ends_before_a_picture_or_behind_it() -> None:
    pictures = [(4, 8), (10, 14)]
    assert [up_to_a_picture(pictures, 0, count) for count in (3, 4, 5, 7, 8, 9, 10, 12, 14, 20)] == [
        3, 4, 4, 4, 8, 9, 10, 10, 14, 20,
    ]  # fmt: skip
    assert up_to_a_picture(pictures, 6, 1) == 0, "what is left of it waits for a step with room"
    assert up_to_a_picture(pictures, 6, 2) == 2


@pytest.mark.slow
@pytest.mark.engine
def test_a_picture_that_another_prompt_shows_is_not_cut(tmp_path: Path) -> None:
    """A step's tokens end before, within and behind the second prompt's picture, whose features are cached."""
    from colograd.runtime import process

    process.prepare_ranks()
    model, tokenizer = tiny_images.random_model("gemma3_vl")
    processor = tiny_images.gemma3_processor(tokenizer)
    reader = ImageReader(processor, model.config.image_token_id)
    folder = tiny_images.make_model(tmp_path / "model", "gemma3_vl")
    config = tiny.config(tmp_path, vllm_engine_kwargs={"max_num_batched_tokens": 40, "max_num_seqs": 4})

    def asked(before: str, after: str) -> ModelInput:
        parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
        row = {"prompt": [{"role": "user", "content": parts}], "images": [tiny_images.picture(3)]}
        return reader.read(row, {"add_generation_prompt": True}, "row")

    first, cut = asked("a", "b"), 0
    pictures = ImagePrompts(1, on_cpu=True, whole=True, processor=processor)
    built = VLLMEngine(str(folder), config, torch.float32, 128, 2**22, features=[pictures])
    with contextlib.closing(built) as engine:
        for length in range(1, 8):
            second = asked("z" * length, "what is it then")
            assert second.images is not None
            cut += second.images.places[0] < 40 - len(first) <= second.images.places[-1]
            (alone,), (_, beside) = logprobs(engine, [second]), logprobs(engine, [first, second])
            assert (alone - beside).abs().max() < 1e-5
    assert cut == 3


def logprobs(engine: VLLMEngine, asked: list[ModelInput]) -> list[torch.Tensor]:
    """Log-probabilities of prompts that the engine reads together, without cached prefixes and features."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    names, found = [engine._enqueue(each, params) for each in asked], dict[str, Any]()
    while engine.core.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.core.step() if output.finished}
    engine.stamp(0)  # which forgets prefixes and features
    return [
        torch.tensor([entry[token].logprob for entry, token in zip(of.prompt_logprobs[1:], each.ids[1:], strict=True)])
        for of, each in zip((found[name] for name in names), asked, strict=True)
    ]

"""Passes of models on a GPU that isn't there (`fake_gpu`): a script that runs those it is given and prints a
dictionary of each."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from fake_gpu import FakeGPU, Seen
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from colograd.batch import PackedRow
from colograd.memory.shape import Lengths, Shape, activation_bytes
from colograd.policy import attention
from colograd.policy.images import set_attention
from colograd.policy.logprobs import PolicyForward
from colograd.policy.packing import dummy
from colograd.policy.sending import to_device_async
from colograd.training.adamw_split import accumulate_in_float32

CUDA = torch.device("cuda", 0)
PROMPT, COMPLETION, GROUP = 512, 512, 8
TOKENS = PROMPT + GROUP * COMPLETION
LENGTHS = Lengths(PROMPT, 8 * COMPLETION, GROUP)  # such that the plan's row is the one that runs
SHAPE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 4,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
CASES: dict[str, Callable[[FakeGPU], dict[str, Any]]] = {}


def case(made: Callable[[FakeGPU], dict[str, Any]]) -> Callable[[FakeGPU], dict[str, Any]]:
    CASES[made.__name__] = made
    return made


def bfloat16(cls: Any, config: Any) -> Any:
    """A model in bfloat16 with packed rows; fakes don't take `Module.to`."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CUDA:
            model = cls(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with mock.patch("torch.cuda.is_available", lambda: True):  # no longer, or torch asks the driver
        set_attention(model, attention.NAME)
    return model.train()


def row() -> PackedRow:
    return dummy(CUDA, [(PROMPT, [COMPLETION] * GROUP)])


def step(gpu: FakeGPU, model: Any, **options: Any) -> dict[str, Any]:
    """The second forward and backward of a step, whose gradients are there."""
    accumulate_in_float32(model.parameters())
    forward = PolicyForward(model, 0.9, **options)

    def once() -> tuple[torch.Tensor, ...]:
        found = forward.of_row(row())
        sum(part.sum() for part in found if part.requires_grad).backward()
        return tuple(part.detach() for part in found)

    once()
    with gpu.watched() as seen:
        outputs = once()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return figures(seen) | {
        "outputs": sorted({f"{part.device.type} {part.dtype}" for part in outputs}),
        "gradients": sorted({f"{p.grad.device.type} {p.grad.dtype}" for p in trained}),
    }


def figures(seen: Seen) -> dict[str, Any]:
    return {
        "flash": dict(seen.flash),
        "waits": seen.waits,
        "devices": sorted(seen.devices),
        "products": sorted(seen.products),
        "peak": seen.peak,
    }


def plan(model: Any, checkpointing: int = 0) -> int:
    """The activations that the memory plan expects."""
    joined = LENGTHS.joined_keys(TOKENS)
    return activation_bytes(Shape.of(model.config), TOKENS, 2, checkpointing, "cuda", joined)


def dense(gpu: FakeGPU, tied: bool) -> dict[str, Any]:
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=tied))
    return step(gpu, model) | {"plan": plan(model)}


@case
def dense_tied(gpu: FakeGPU) -> dict[str, Any]:
    return dense(gpu, tied=True)


@case
def dense_untied(gpu: FakeGPU) -> dict[str, Any]:
    return dense(gpu, tied=False)


@case
def tower(gpu: FakeGPU) -> dict[str, Any]:
    """Of Qwen2.5-VL, one layer with windows and one with whole pictures. What it works out from its pictures' sizes
    before its layers is given, as its numbers aren't there."""
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 10000.0}
    vision = {"depth": 2, "fullatt_block_indexes": [1], "out_hidden_size": 256}  # else as published
    text = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 512, "rope_parameters": rope}  # fmt: skip
    model = bfloat16(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    seeing = model.model.visual
    grids = torch.tensor([[1, 16, 24], [1, 12, 8]])
    windows, cu_windows = get_vision_window_index(grids, 2, seeing.window_size, seeing.patch_size)
    cu_seqlens = get_vision_cu_seqlens(grids)
    sizes = {
        "position_ids": get_vision_position_ids(grids, 2), "window_index": windows, "cu_window_seqlens": cu_windows,
        "cu_seqlens": cu_seqlens, "grid_thw": grids,
    }  # fmt: skip
    given: dict[str, Any] = {name: to_device_async(value, CUDA) for name, value in sizes.items()}
    most = {"max_seqlen": cu_seqlens, "max_window_seqlen": cu_windows}
    given |= {name: int(places.diff().max()) for name, places in most.items()}
    pixels = torch.zeros(int(cu_seqlens[-1]), 3 * 2 * 14**2, dtype=torch.bfloat16, device=CUDA)
    with gpu.watched() as seen:
        features = seeing(pixels, **given).pooler_output
        features.sum().backward()
    assert all(parameter.grad is not None for parameter in seeing.parameters())
    return figures(seen)


def main() -> None:
    for name in sys.argv[1:] or CASES:
        with FakeGPU() as gpu:
            try:
                found = CASES[name](gpu)
            except Exception:
                found = {"error": traceback.format_exc()}
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main()

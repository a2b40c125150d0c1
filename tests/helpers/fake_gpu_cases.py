"""Script that runs passes of models on a fake GPU (`fake_gpu`), and prints a dictionary for each."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import cuda_places
import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from fake_gpu import FakeGPU, Seen
from needs import has
from peft import LoraConfig
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from colograd.batch import PackedRow, StepBatch
from colograd.checkpoint.writing import HostFiles
from colograd.memory.description import PolicySizes
from colograd.memory.shape import Lengths, Shape, Trained, activation_bytes
from colograd.policy import attention
from colograd.policy.logprobs import PolicyForward, with_old_logprobs
from colograd.policy.lora import wrap
from colograd.policy.packing import collate, dummy
from colograd.policy.row_proof import install_steps, set_attention
from colograd.policy.sending import to_device_async
from colograd.sharding.zero import WholeCopies
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32

if has("experts"):
    from colograd.extensions.experts.losses import RoutingStep
if has("lora"):
    from colograd.extensions.lora.adapters import keep_inputs_as_they_are
if has("offload"):
    from colograd.extensions.offload import host_stream
    from colograd.extensions.offload.adamw import HostAdamW
    from colograd.extensions.offload.layer_inputs import LayerInputs, inputs_on_host
    from colograd.extensions.offload.on_host import WholeOnHost
if has("reference"):
    from colograd.extensions.reference.model import FrozenCopy

CUDA = torch.device("cuda", 0)
PROMPT, COMPLETION, GROUP = 512, 512, 8
TOKENS = PROMPT + GROUP * COMPLETION
LENGTHS = Lengths(PROMPT, 8 * COMPLETION, GROUP)  # of the row that runs
SHAPE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 4,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
LIMIT = 2**27  # bytes of gradients in transfer to the host
MORE_LAYERS = {"num_hidden_layers": 8}
CASES: dict[str, Callable[[FakeGPU], dict[str, Any]]] = {}


def case(made: Callable[[FakeGPU], dict[str, Any]]) -> Callable[[FakeGPU], dict[str, Any]]:
    CASES[made.__name__] = made
    return made


def bfloat16(cls: Any, config: Any) -> Any:
    """Build a model in bfloat16 with packed rows, because fakes don't take `Module.to`."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CUDA:
            model = cls(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with mock.patch("torch.cuda.is_available", lambda: True):  # no longer, or torch asks the driver
        install_steps(model)
        set_attention(model, attention.NAME)
    return model.train()


ROW = [(PROMPT, [COMPLETION] * GROUP)]


def row() -> PackedRow:
    return dummy(CUDA, ROW)


def step(gpu: FakeGPU, model: Any, groups: Any = ROW, warm: bool = True, **options: Any) -> dict[str, Any]:
    """Measure a forward and backward. ``warm``: after a first forward and backward."""
    accumulate_in_float32(model.parameters())
    forward = PolicyForward(model, 0.9, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def once() -> tuple[torch.Tensor, ...]:
        *found, values = forward(collate(dummy(CUDA, groups)))
        found += values.values()
        sum(part.sum() for part in found if part.requires_grad).backward()
        return tuple(part.detach() for part in found)

    if warm:
        once()
    else:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter, dtype=torch.float32)
    with gpu.watched() as seen:
        outputs = once()
    return figures(seen) | {
        "outputs": sorted({f"{part.device.type} {part.dtype}" for part in outputs}),
        "gradients": sorted({f"{p.grad.device.type} {p.grad.dtype}" for p in trained}),
    }


def figures(seen: Seen) -> dict[str, Any]:
    return {
        "flash": dict(seen.flash),
        "waits": seen.waits,
        "copied": seen.copied,
        "devices": sorted(seen.devices),
        "products": sorted(seen.products),
        "peak": seen.peak,
    }


def plan(
    model: Any, checkpointing: int = 0, lengths: Lengths = LENGTHS, tokens: int = TOKENS,
    **on_host: Any,
) -> int:  # fmt: skip
    """Return the activations that the memory plan expects."""
    head, shape = model.get_output_embeddings().weight.requires_grad, Shape.of(model.config)
    copied = lengths.copied_keys(shape, tokens, 2, "cuda")
    adapted = any("lora" in name for name, _ in model.named_parameters())
    return activation_bytes(shape, tokens, 2, checkpointing, "cuda", copied, Trained(head, adapted, **on_host))


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
def several_groups(gpu: FakeGPU) -> dict[str, Any]:
    """Prompts that aren't neighbours in the row."""
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    return step(gpu, model, [(PROMPT, [COMPLETION] * 3), (2 * PROMPT, [COMPLETION] * 3)]) | {"plan": plan(model)}


@case
def many_segments(gpu: FakeGPU) -> dict[str, Any]:
    """576 segments of 8 tokens: the backward of attention has the largest peak."""
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE | {"vocab_size": 1024, "intermediate_size": 1024}))
    return step(gpu, model, [(8, [8] * GROUP)] * 64) | {"plan": plan(model, 0, Lengths(8, 8 * 8, GROUP))}


@case
def long_prompt(gpu: FakeGPU) -> dict[str, Any]:
    model, half, count = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE)), TOKENS // 2, 32
    groups = [(half, [half // count] * count)]
    return step(gpu, model, groups) | {"plan": plan(model, 0, Lengths(half, 8 * half // count, count))}


@case
def checkpointed(gpu: FakeGPU) -> dict[str, Any]:
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return step(gpu, model) | {"plan": plan(model, checkpointing=1)}


@case
def inputs_on_the_host(gpu: FakeGPU) -> dict[str, Any]:
    """Layers' inputs on the host, followed by a row of half the length."""

    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE | MORE_LAYERS))
    with inputs_on_host(model, LayerInputs(CUDA)):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found, locked = step(gpu, model), gpu.locked
        step(gpu, model, [(PROMPT, [COMPLETION] * (GROUP // 2))])
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again = gpu.locked
    inputs = 8 * TOKENS * SHAPE["hidden_size"] * 2
    return found | {
        "locked": [locked, again, gpu.locked], "inputs": inputs, "plan": plan(model, 1, inputs_on_host=True),
        "plan_without": plan(model, 1),
    }  # fmt: skip


@case
def windows(gpu: FakeGPU) -> dict[str, Any]:
    model = bfloat16(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=256))
    return step(gpu, model) | {"plan": plan(model)}


EXPERTS = {
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 64,
}


@case
def mixture(gpu: FakeGPU) -> dict[str, Any]:

    config = Qwen3MoeConfig(**SHAPE | EXPERTS, num_experts=8, moe_intermediate_size=768)
    model = bfloat16(Qwen3MoeForCausalLM, config)
    return step(gpu, model, steps=(RoutingStep(),)) | {"plan": plan(model)}


@case
def sinks(gpu: FakeGPU) -> dict[str, Any]:
    """GPT-OSS: a layer with a window, a layer without, and experts."""
    config = GptOssConfig(**SHAPE | EXPERTS | {"intermediate_size": 768}, num_local_experts=8, sliding_window=128)
    model = bfloat16(GptOssForCausalLM, config)
    return step(gpu, model) | {"plan": plan(model)}


def adapted(model: Any) -> Any:
    with CUDA, mock.patch("torch.nn.Module.to", lambda module, *of, **also: module):  # all is there
        model = wrap(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), seed=0).train()
    keep_inputs_as_they_are(model)
    return model


@case
def adapter(gpu: FakeGPU) -> dict[str, Any]:
    model = adapted(bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE)))
    return step(gpu, model) | {"plan": plan(model)}


@case
def packed_base(gpu: FakeGPU) -> dict[str, Any]:
    model = four_bit_base()
    return step(gpu, model) | {"plan": plan(model)}


def four_bit_base() -> Any:
    """A 4-bit base of bitsandbytes below an adapter, made by hand, because packing looks at values."""
    model = adapted(bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE)))
    with CUDA:
        for module in list(model.modules()):
            if isinstance(getattr(module, "base_layer", None), torch.nn.Linear):
                module.base_layer = four_bits(module.base_layer)
    return model


def four_bits(linear: torch.nn.Linear) -> torch.nn.Module:
    out, given = linear.weight.shape
    with unset_fake_temporarily(), torch.device("cpu"):
        packed = Linear4bit(8, 8, bias=False, compute_dtype=torch.bfloat16)
    packed.bias = linear.bias
    scales = torch.empty(out * given // 64)
    weight: Any = torch.nn.Parameter(torch.empty(out * given // 2, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = QuantState(scales, linear.weight.shape, torch.empty(16), 64, "nf4", torch.bfloat16)
    packed._parameters["weight"] = weight
    return packed


LONG = 2**17  # tokens of one sequence


def long_row(gpu: FakeGPU, model: Any) -> dict[str, Any]:
    """Two completions of a prompt, each with it a sequence of 131,072 tokens."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    groups, tokens = [(2048, [LONG - 2048] * 2)], 2 * LONG - 2048
    planned = plan(model, 1, Lengths(2048, LONG - 2048, 2), tokens)
    return step(gpu, model, groups, warm=False) | {"plan": planned}


@case
def long_sequences(gpu: FakeGPU) -> dict[str, Any]:
    return long_row(gpu, bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE)))


@case
def long_sequences_of_a_packed_base(gpu: FakeGPU) -> dict[str, Any]:
    return long_row(gpu, four_bit_base())


@case
def long_windows(gpu: FakeGPU) -> dict[str, Any]:
    """Mistral with its published width."""
    return long_row(gpu, bfloat16(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=4096)))


@case
def long_soft_caps(gpu: FakeGPU) -> dict[str, Any]:
    """Gemma 2, with scores that no GPU has room for."""
    return long_row(gpu, bfloat16(Gemma2ForCausalLM, Gemma2Config(**SHAPE, head_dim=128, sliding_window=4096)))


@case
def soft_caps(gpu: FakeGPU) -> dict[str, Any]:
    """Two long completions, so that the plans of copied keys and of scores both count."""
    model = bfloat16(Gemma2ForCausalLM, Gemma2Config(**SHAPE, head_dim=128, sliding_window=4096))
    lengths, tokens = Lengths(PROMPT, 4 * COMPLETION, 2), PROMPT + 8 * COMPLETION
    return step(gpu, model, [(PROMPT, [4 * COMPLETION] * 2)]) | {"plan": plan(model, 0, lengths, tokens)}


@case
def old_logprobs(gpu: FakeGPU) -> dict[str, Any]:
    """Without a gradient only one layer's activations exist at once."""
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    with gpu.watched() as seen:
        (found,) = with_old_logprobs(model, StepBatch((row(),), TOKENS, GROUP, {}, ()), 0.9).rows
    old = found.scores["old_logprobs"]
    return figures(seen) | {"outputs": [f"{old.device.type} {old.dtype}"]}


@case
def entropy(gpu: FakeGPU) -> dict[str, Any]:
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    return step(gpu, model, entropy_gradient=True) | {"plan": plan(model)}


@case
def reference(gpu: FakeGPU) -> dict[str, Any]:
    """A reference model on the device. Fakes don't follow `parameter.data`, which offloading sets."""
    model, before = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE)), gpu.bytes
    reference = FrozenCopy(model, CUDA, offload=False)
    copy = gpu.bytes - before
    with gpu.watched() as seen, reference.present() as present:
        PolicyForward(present, 0.9)(collate(row()))
    return figures(seen) | {"weights": weight_bytes(model), "copy": copy}


def weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def optimizer_step(gpu: FakeGPU, kind: type[AdamWSplit] = AdamWSplit, **settings: bool) -> dict[str, Any]:
    """The second step, by torch's kernels, because Triton's need a device."""
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    accumulate_in_float32(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter, dtype=torch.float32)
    optimizer, before = kind(model.parameters(), **{"compiled": False} | settings), gpu.bytes
    with mock.patch("torch.compile", lambda function, **options: function):
        optimizer.step()
    state = gpu.bytes - before
    with gpu.watched() as seen:
        optimizer.step()
    return figures(seen) | {"weights": weight_bytes(model), "state": state}


@case
def optimizer(gpu: FakeGPU) -> dict[str, Any]:
    return optimizer_step(gpu)


@case
def compiled_optimizer(gpu: FakeGPU) -> dict[str, Any]:
    return optimizer_step(gpu, compiled=True)


@case
def streamed_optimizer(gpu: FakeGPU) -> dict[str, Any]:

    return optimizer_step(gpu, HostAdamW, streamed=True)


def on_host(gpu: FakeGPU, tied: bool) -> dict[str, Any]:
    """Three backwards of a step. The second and third add to sums on the host."""

    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=tied))
    accumulate_in_float32(model.parameters())
    forward, before = PolicyForward(model, 0.9), gpu.bytes
    with mock.patch.object(host_stream, "LIMIT", LIMIT):
        sharding, locked = WholeOnHost(model), []
        with gpu.watched() as seen:
            for _ in range(3):
                sharding.backward(sum(part.sum() for part in forward(collate(row()))[:2] if part.requires_grad))
                locked.append(gpu.locked)
        sharding.sums.settle()
        sizes, planned = PolicySizes.of(model, "adamw_split", 2), plan_of_gradients(model)
    return figures(seen) | {
        "held": gpu.bytes - before, "locked": locked, "gradients": sizes.gradients, "plan": planned,
        "locked_again": gpu.locked_again,
    }  # fmt: skip


def plan_of_gradients(model: Any, checkpointing: int = 0) -> int:
    """Plan a pass with gradients on the host, and with ``checkpointing`` also the layers' inputs."""

    sizes = PolicySizes.of(model, "adamw_split", 2)
    on_way = host_stream.on_way(sizes.gradients, 4 * sizes.matrix)
    activations = plan(model, checkpointing, inputs_on_host=bool(checkpointing), on_way=on_way)
    return activations + on_way + host_stream.device_bytes(sizes.gradients, 4)


@case
def gradients_on_host(gpu: FakeGPU) -> dict[str, Any]:
    return on_host(gpu, tied=False)


@case
def gradients_on_host_tied(gpu: FakeGPU) -> dict[str, Any]:
    return on_host(gpu, tied=True)


@case
def small_vocabulary_on_host(gpu: FakeGPU) -> dict[str, Any]:
    """The last gradients of a backward are still being copied during the next forward."""
    global SHAPE
    before, SHAPE = SHAPE, SHAPE | {"vocab_size": 4000}
    found = on_host(gpu, tied=False)
    SHAPE = before
    return found


def two_steps(gpu: FakeGPU, model: Any, offloads: bool) -> list[int]:
    """Train a step of one row and a step of two. Return the bytes of page-locked memory after each."""
    from colograd.extensions.offload.layer_inputs import LayerInputs, inputs_on_host

    accumulate_in_float32(model.parameters())
    sharding, locked = (WholeOnHost if offloads else WholeCopies)(model), []
    optimizer = HostAdamW(model.parameters(), compiled=False, streamed=offloads)
    sharding.share(optimizer)
    with inputs_on_host(model, LayerInputs(CUDA) if offloads else None):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        forward = PolicyForward(model, 0.9)
        for rows in (1, 2):
            for _ in range(rows):
                sharding.backward(sum(part.sum() for part in forward(collate(row()))[:2] if part.requires_grad))
            sharding.sum_gradients()
            optimizer.step()
            model.zero_grad()
            locked.append(gpu.locked)
    return locked


@case
def all_on_host(gpu: FakeGPU) -> dict[str, Any]:
    """All parts are offloaded, on a GPU with a tenth more memory than planned."""

    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    with mock.patch.object(host_stream, "LIMIT", LIMIT):
        planned = plan_of_gradients(model, 1)
        gpu.capacity = int(gpu.bytes + 1.1 * planned)
        with gpu.watched() as seen:
            locked = two_steps(gpu, model, offloads=True)
        found = figures(seen) | {"plan": planned, "locked": locked, "locked_again": gpu.locked_again}
        found["capacity"] = gpu.capacity
        try:
            two_steps(gpu, model, offloads=False)
        except torch.OutOfMemoryError as error:
            found["without"] = str(error)
    return found


@case
def checkpoint(gpu: FakeGPU) -> dict[str, Any]:
    """The second checkpoint, in the memory of the first."""
    model = bfloat16(Qwen2ForCausalLM, Qwen2Config(**SHAPE))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    files = HostFiles(CUDA)
    for _ in range(2):
        with gpu.watched() as seen:
            files.put(tensors, "model.safetensors")
            files.take()
    return figures(seen) | {"weights": weight_bytes(model)}


@case
def tower(gpu: FakeGPU) -> dict[str, Any]:
    """Qwen2.5-VL: a layer with windows, and one without. Fakes have no numbers, so positions are passed in."""
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
        print(json.dumps({"name": name, **found, "reached": cuda_places.reached()}), flush=True)


if __name__ == "__main__":
    main()

"""Estimated bytes from a decoder's shape, compared with the bytes of autograd, packing and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from saved_tensors import kept
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.memory import shape as memory
from colograd.memory.shape import CopiedKeys, Lengths, Shape
from colograd.policy import attention
from colograd.policy.logprobs import Pass, run_body
from colograd.policy.merged_attention import calls_at_once
from colograd.policy.packing import pack

CPU = torch.device("cpu")
LAYERS, HIDDEN, INNER, HEADS, KEYS, HEAD, VOCABULARY = 3, 64, 160, 4, 2, 16, 100
LLAMA = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS, "head_dim": HEAD, "vocab_size": VOCABULARY,
}  # fmt: skip


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).to(dtype)


def test_a_shape_is_read_from_the_configuration() -> None:
    assert Shape.of(LlamaConfig(**LLAMA)) == Shape(LAYERS, HIDDEN, INNER, HEADS * HEAD, KEYS * HEAD, HEAD, VOCABULARY)
    plain = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=None, head_dim=None)
    assert (Shape.of(plain).queries, Shape.of(plain).keys) == (64, 64)


def test_engine_ranks_split_each_layer_repeating_key_heads() -> None:
    shape = Shape.of(LlamaConfig(**LLAMA))
    two, four = shape.split(2), shape.split(4)
    assert (two.keys, four.keys) == (HEAD, HEAD), "two key heads on four ranks: each is there twice"
    assert (four.queries, four.intermediate, four.vocabulary) == (HEAD, INNER // 4, VOCABULARY // 4)
    assert (four.hidden, four.layers) == (HIDDEN, LAYERS) and shape.split(1) == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("checkpointing", [0, 1, 2])
def test_the_estimate_of_activations_is_near_what_a_forward_keeps(dtype: torch.dtype, checkpointing: int) -> None:
    tokens, model = 512, llama(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=checkpointing)
    model.train()
    ids = torch.randint(VOCABULARY, (1, tokens))
    held = kept(model, lambda: model.model(ids, use_cache=False).last_hidden_state)
    shape = Shape.of(model.config)
    layer = memory.layer_bytes(shape, dtype.itemsize)
    again = {0: 0, 1: LAYERS, 2: (LAYERS + 1) // 2}[checkpointing]
    expected = again * HIDDEN * dtype.itemsize + (LAYERS - again) * layer
    expected += HIDDEN * (4 + dtype.itemsize)  # the final norm
    assert 0.75 < held / (tokens * expected) < 1.25
    whole = memory.activation_bytes(shape, tokens, dtype.itemsize, checkpointing, "cpu")
    assert whole > tokens * expected


def test_activations_grow_with_the_tokens_and_shrink_with_checkpointing() -> None:
    shape = Shape.of(LlamaConfig(**LLAMA))
    one, two = (memory.activation_bytes(shape, tokens, 2, 0, "cpu") for tokens in (1000, 2000))
    none = memory.activation_bytes(shape, 0, 2, 0, "cpu")
    assert two - one == one - none and none == 2 * 4 * 2**23 + 4 * VOCABULARY * HIDDEN
    every, second = (memory.activation_bytes(shape, 1000, 2, checkpointing, "cpu") for checkpointing in (1, 2))
    assert every < second < one


# -- keys that are copied, joined with a prompt's


def scored(prompt: int, completion: int, count: int, position: int = 0) -> ScoredGroup:
    rollouts = tuple(
        Rollout((1,) * prompt, (2,) * completion, torch.zeros(completion), torch.ones(completion).bool(),
                FinishReason.STOP, 0)
        for _ in range(count)
    )  # fmt: skip
    return ScoredGroup(Group({}, rollouts, position), torch.zeros(count, 1), torch.ones(count))


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("prompt, completion, count", [(100, 80, 4), (500, 16, 8), (7, 800, 2)])
def test_joined_keys_are_those_that_attention_gathers(prompt: int, completion: int, count: int, window: int) -> None:
    """Rows as planned: completions have an eighth of the maximum length."""
    short = completion // memory.SHORT
    tokens = prompt + count * short
    (row,) = pack([scored(prompt, short, count)], tokens, False, CPU)
    (call,) = calls_at_once(row.layout, window or 10**6, CPU)
    assert isinstance(call.keys, torch.Tensor)
    joined = Lengths(prompt, completion, count).joined_keys(tokens, window)
    assert joined == pytest.approx(len(call.keys) / tokens)


@pytest.mark.parametrize("copied", [False, True])
def test_long_prompts_with_short_completions_keep_what_is_estimated(
    copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 completions of 4 tokens share a prompt of 500 tokens. If keys are copied, the copies are most of the
    activations."""
    model, (row,) = llama(), pack([scored(500, 4, 16)], 1000, False, CPU)
    model.set_attn_implementation(attention.NAME)
    if copied:
        monkeypatch.setattr(attention, "_calls", lambda *given: ())
    tokens = row.layout.num_tokens
    held = kept(model.train(), lambda: run_body(Pass(model, row, 1.0)))
    shape, joined = Shape.of(model.config), Lengths(500, 4 * memory.SHORT, 16).joined_keys(tokens)
    without, expected = (LAYERS * tokens * memory.layer_bytes(shape, 2, keys) for keys in (0.0, joined * copied))
    assert 0.75 < held / expected < 1.25 and (held > 1.4 * without) == copied


def test_keys_are_copied_where_no_kernel_reads_them_in_place() -> None:
    lengths, plain, tokens = Lengths(1000, 800, 8), Shape.of(LlamaConfig(**LLAMA)), 1800
    joined = lengths.joined_keys(tokens)
    capped, windowed = replace(plain, copies=True), replace(plain, window=512)
    for shape, itemsize, device, expected in (
        (plain, 2, "cuda", CopiedKeys(padding=128 * 9 / 1800)),
        (plain, 4, "cpu", CopiedKeys()),
        (plain, 4, "cuda", CopiedKeys(joined, joined)),
        (capped, 2, "cuda", CopiedKeys(joined, joined)),
        (windowed, 2, "cpu", CopiedKeys(joined, joined)),
        (windowed, 2, "cuda", CopiedKeys(0.0, lengths.joined_keys(tokens, 512), padding=128 * 9 / 1800)),
        (replace(plain, window=1800), 2, "cpu", CopiedKeys()),
    ):
        assert lengths.copied_keys(shape, tokens, itemsize, device) == expected
    short = Lengths(attention.IN_PLACE_FROM - 1, 800, 8)
    assert short.copied_keys(plain, tokens, 4, "cpu").kept > 1 and not short.copied_keys(plain, tokens, 2, "cuda").kept


def test_a_row_without_shared_prompts_joins_nothing() -> None:
    shape = Shape.of(LlamaConfig(**LLAMA))
    assert Lengths(500, 16, 1).joined_keys(4096) == 1.0
    assert Lengths(500, 16, 1).copied_keys(shape, 4096, 4, "cuda") == CopiedKeys()


def test_a_group_cut_by_the_budget_joins_less() -> None:
    lengths = Lengths(1000, 800, 64)
    assert lengths.joined_keys(1300) == (1000 + 3 * 1100) / 1300, "three of its completions are in a row"
    assert lengths.joined_keys(1300) < lengths.joined_keys(2**20)


def test_long_prompts_with_short_completions_take_more() -> None:
    """On a GPU all joined keys and values have a gradient per query head: nearly 9 times the row's own."""
    shape, tokens = Shape.of(LlamaConfig(**LLAMA)), 2**17  # more than the head's tiles take
    joined = Lengths(8000, 64, 8).joined_keys(tokens)
    assert 8.5 < joined < 9
    nothing, copies = CopiedKeys(), CopiedKeys(joined, joined)
    plain, more = (memory.activation_bytes(shape, tokens, 2, True, "cuda", keys) for keys in (nothing, copies))
    extra = tokens * 2 * 2 * KEYS * HEAD * (joined - 1)
    assert more - plain > extra
    without = memory.activation_bytes(shape, tokens, 2, False, "cuda", copies)
    assert without - memory.activation_bytes(shape, tokens, 2, False, "cuda") > LAYERS * extra

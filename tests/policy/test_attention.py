"""Packed attention equals the padded computation of plain transformers: log-probabilities, loss and every gradient.

Both sides are the same random float32 weights. The padded side is transformers' own: one row per sequence, prompt
repeated, an attention mask, `sdpa`. The packed side is the code that training runs. If both agree for a family, the
differences between families (rotary positions, biases, query norms, windows) are right too, because packing changes
nothing but positions and visibility.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import FAMILIES, VOCABULARY, make_groups, make_model, packed_copy
from flash_kernels import KERNELS, flash_backward, flash_forward

from colograd.batch import ScoredGroup, SegmentLayout
from colograd.policy import attention, merged_attention
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.merged_attention import Call, MergedAttention, blocks, calls_at_once, calls_one_by_one
from colograd.policy.packing import pack

CPU = torch.device("cpu")


def padded_logprobs(model: Any, groups: list[ScoredGroup]) -> list[torch.Tensor]:
    """[C] for each rollout, from one padded batch."""
    rollouts = [rollout for group in groups for rollout in group.group.rollouts]
    rows = [torch.tensor((*r.prompt_ids, *r.completion_ids)) for r in rollouts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logprobs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
    found = []
    for index, rollout in enumerate(rollouts):
        start, end = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids)
        predicted = logprobs[index, start - 1 : end - 1]
        found.append(predicted.gather(1, ids[index, start:end, None]).squeeze(1))
    return found


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-8))


def compare(family: str, budget: int, checkpointing: bool = False) -> int:
    """Everything of one step both ways; the number of micro-batches."""
    plain, groups = make_model(family), make_groups()
    packed = packed_copy(plain, checkpointing)
    expected = padded_logprobs(plain, groups)
    advantages = torch.cat([group.advantages for group in groups])
    loss = -sum((a * row).sum() for a, row in zip(advantages, expected, strict=True))
    loss.backward()

    rows = pack(groups, budget, False, CPU)
    total, of_completion = torch.zeros(()), {}
    for row in rows:
        logprobs, _ = policy_logprobs(packed, row, 1.0)
        part = -(row.advantages * logprobs).sum()
        part.backward()
        total += part.detach()
        for index in range(row.num_sequences):
            mine = row.sequence == index
            of_completion[tuple(row.labels[mine].tolist())] = logprobs[mine].detach()
    rollouts = [rollout for group in groups for rollout in group.group.rollouts]
    assert len(of_completion) == len(rollouts)
    for rollout, wanted in zip(rollouts, expected, strict=True):
        assert relative_error(of_completion[tuple(rollout.completion_ids)], wanted.detach()) < 1e-4
    assert relative_error(total, loss.detach()) < 1e-4
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and theirs.grad.abs().sum() > 0, name
        assert relative_error(ours.grad, theirs.grad) < 1e-4, name
    return len(rows)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("budget", [1000, 25], ids=["one row", "split groups"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(family: str, budget: int, checkpointing: bool, tried: Any) -> None:
    with attention.keys_in_place_from(0 if budget == 1000 else 10**6):  # both ways of attention
        assert (compare(family, budget, checkpointing) == 1) == (budget == 1000)
    tried(family.partition(",")[0], "packed")


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_packed_is_as_near_to_float32_as_bfloat16_padded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round the same gradient, and neither may be less exact. A margin of a quarter allows for chance."""
    monkeypatch.setattr(attention, "_in_place_from", 0)
    groups = make_groups()
    exact = make_model(family)
    gradient(exact, padded_loss(exact, groups))
    errors = {}
    for name in ("padded", "packed"):
        model = packed_copy(make_model(family)) if name == "packed" else make_model(family)
        model.to(torch.bfloat16)
        gradient(model, packed_loss(model, groups) if name == "packed" else padded_loss(model, groups))
        found, wanted = (torch.cat([p.grad.float().flatten() for p in m.parameters()]) for m in (model, exact))
        errors[name] = relative_error(found, wanted)
    assert errors["packed"] < 1.25 * errors["padded"] < 1.0, errors


def padded_loss(model: Any, groups: list[ScoredGroup]) -> torch.Tensor:
    advantages = torch.cat([group.advantages for group in groups])
    return -sum((a * row).sum() for a, row in zip(advantages, padded_logprobs(model, groups), strict=True))


def packed_loss(model: Any, groups: list[ScoredGroup]) -> torch.Tensor:
    (row,) = pack(groups, 1000, False, CPU)
    return -(row.advantages * policy_logprobs(model, row, 1.0)[0]).sum()


def gradient(model: Any, loss: torch.Tensor) -> None:
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_prompt_goes_through_the_model_once() -> None:
    """Three prompts for nine completions: 12 + 1 + 6 prompt tokens, not three times as many."""
    groups = make_groups()
    (row,) = pack(groups, 1000, False, CPU)
    assert row.layout.num_tokens == 12 + 1 + 6 + (11 + 1 + 7) + (4 + 9 + 2) + (1 + 8 + 8)
    seen: list[int] = []
    model = packed_copy(make_model("llama"))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    policy_logprobs(model, row, 1.0)
    assert seen == [row.layout.num_tokens]


# -- The attention function alone


def random_qkv(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))  # type: ignore[return-value]


def dense(layout: SegmentLayout, window: int | None = None) -> torch.Tensor:
    """(1, T, 4, 16) attention output by a full visibility matrix, written from the layout's definition."""
    query, key, value = random_qkv(layout.num_tokens)
    segment = [s for s, length in enumerate(layout.lengths) for _ in range(length)]
    before = [sum(layout.lengths[s] for s in seen) for seen in layout.attends_to]
    position = [before[s] + t - layout.starts[s] for t, s in enumerate(segment)]
    visible = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for q, k in itertools.product(range(layout.num_tokens), repeat=2):
        own, earlier = segment[k] == segment[q] and k <= q, segment[k] in layout.attends_to[segment[q]]
        visible[q, k] = (own or earlier) and (window is None or position[q] - position[k] < window)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


LAYOUTS = {
    "one sequence": SegmentLayout((7,), ((),)),
    "one group": SegmentLayout((3, 2, 4), ((), (0,), (0,))),
    "two groups": SegmentLayout((2, 3, 1, 4, 2), ((), (0,), (0,), (), (3,))),
    "a conversation of turns": SegmentLayout((3, 2, 2, 1), ((), (0,), (0, 1), (0, 1, 2))),
    "a tree": SegmentLayout((3, 2, 1, 2, 4, 2, 1, 3), ((), (0,), (0, 1), (0, 1), (0,), (), (5,), (5, 6))),
}


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_each_segment_sees_itself_and_what_it_names(layout: SegmentLayout, window: int | None) -> None:
    query, key, value = random_qkv(layout.num_tokens)
    output, weights = attention.packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, layout=layout
    )
    assert weights is None
    torch.testing.assert_close(output, dense(layout, window))


ONE = SegmentLayout((4,), ((),))


def test_more_than_one_row_is_refused() -> None:
    query, key, value = (x.expand(2, -1, -1, -1) for x in random_qkv(4))
    with pytest.raises(ValueError, match=r"takes one row, not 2: pass input ids of shape \(1, tokens\)"):
        attention.packed_attention(torch.nn.Module(), query, key, value, None, layout=ONE)


@pytest.mark.parametrize("feature", [{"softcap": 50.0}, {"both_ways": attention.ImageRuns([(0, 2)])}])
def test_what_would_be_computed_wrongly_is_refused(feature: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="two of these: soft-capping, sinks"):
        attention.packed_attention(torch.nn.Module(), *random_qkv(4), None, ONE, torch.zeros(4), **feature)


def test_a_mask_a_bias_or_a_bidirectional_layer_is_refused() -> None:
    for wrong, said in (({"is_causal": False}, "isn't causal"), ({"position_bias": torch.zeros(4)}, "mask or bias")):
        with pytest.raises(ValueError, match=said):
            attention.packed_attention(torch.nn.Module(), *random_qkv(4), None, layout=ONE, **wrong)
    with pytest.raises(ValueError, match="mask or bias"):
        attention.packed_attention(torch.nn.Module(), *random_qkv(4), torch.zeros(1, 1, 4, 4), layout=ONE)
    bidirectional = torch.nn.Module()
    bidirectional.is_causal = False  # as in Gemma 3's embedding models
    with pytest.raises(ValueError, match="isn't causal"):
        attention.packed_attention(bidirectional, *random_qkv(4), None, layout=ONE)


def test_only_earlier_segments_can_be_seen() -> None:
    for lengths, sees in (((2, 2), ((1,), ())), ((2,), ((0,),)), ((2, 2), ((),))):
        with pytest.raises(AssertionError):
            SegmentLayout(lengths, sees)


def attend_and_differentiate(attend: Any, layout: SegmentLayout, dtype: torch.dtype = torch.float32) -> Any:
    """Output, and the gradients of query, key and value."""
    inputs = [x.to(dtype).requires_grad_() for x in random_qkv(layout.num_tokens)]
    output = attend(*inputs)
    output.mul(torch.arange(output.numel()).view_as(output) % 7).sum().backward()
    return (output.detach(), *(x.grad for x in inputs))


def loop_over_segments(layout: SegmentLayout, window: int | None = None) -> Any:
    return lambda *row: attention._segment_attention(*row, layout, (0.3, 0.0, None), window)


def merged(calls: tuple[Call, ...]) -> Any:
    return lambda *row: attention.run_merged(*row, calls, 0.3)


@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_keys_read_in_place_give_what_copied_ones_do(layout: SegmentLayout, dtype: torch.dtype, allowed: float) -> None:
    """Output and gradients, of torch's own kernels for a CPU."""
    expected = attend_and_differentiate(loop_over_segments(layout), layout, torch.float64)
    for found, wanted in zip(
        attend_and_differentiate(merged(calls_one_by_one(layout)), layout, dtype), expected, strict=True
    ):
        assert found.dtype == dtype and relative_error(found, wanted) < allowed


def test_no_key_is_kept_twice() -> None:
    """For 16 completions of a prompt the backward stores queries, keys, values, output and log-sum-exp once."""
    layout = SegmentLayout((150, *(3,) * 16), ((), *((0,),) * 16))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    row = [x.requires_grad_() for x in random_qkv(layout.num_tokens)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention.packed_attention(torch.nn.Module(), *row, None, layout=layout)
    assert sum(kept.values()) == layout.num_tokens * 4 * (4 * 16 + 2 * 2 * 16 + 4 * 16 + 4)


def test_a_window_that_hides_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = [], attention._calls
    monkeypatch.setattr(attention, "_calls", lambda *given: seen.append(given[-1]) or own(*given))
    layout = LAYOUTS["two groups"]
    for window in (6, 5):
        attention.packed_attention(
            torch.nn.Module(), *random_qkv(layout.num_tokens), None, layout=layout, sliding_window=window
        )
    assert seen == [None, 5], "the longest sequence has 6 tokens"


def test_the_blocks_of_a_layout() -> None:
    """Row p p p | a a | b b b b: one block, all completions' queries and the prompt's keys. Tree: a block per depth."""
    ((block,),) = blocks(LAYOUTS["one group"])
    assert (block.queries, block.keys) == (slice(3, 9), slice(0, 3))
    first, second = blocks(LAYOUTS["a tree"])
    assert [(block.queries, block.keys) for block in first] == [
        (slice(3, 12), slice(0, 3)), (slice(14, 18), slice(12, 14))
    ]  # fmt: skip
    assert [(block.queries, block.keys) for block in second] == [
        (slice(5, 8), slice(3, 5)), (slice(15, 18), slice(14, 15))
    ]  # fmt: skip


def test_the_flash_kernels_calls_of_a_group_copy_nothing() -> None:
    """The CUDA path needs a GPU; its bookkeeping doesn't. Row: p p p | a a | b b b b."""
    own, of_prompts = calls_at_once(LAYOUTS["one group"], None, CPU)
    assert (own.queries, own.keys, own.causal) == (None, None, True)
    assert (of_prompts.queries, of_prompts.keys, of_prompts.causal) == (slice(3, 9), slice(0, 3), False)
    for call, queries, keys, longest in (
        (own, [0, 3, 5, 9], [0, 3, 5, 9], (4, 4)),
        (of_prompts, [0, 6], [0, 3], (6, 3)),
    ):
        assert call.sequences is not None and call.sequences[2:] == longest
        assert [places.tolist() for places in call.sequences[:2]] == [queries, keys]
        assert call.sequences[0].dtype == call.sequences[1].dtype == torch.int32


def test_of_several_groups_the_flash_kernel_gets_each_prompt_once() -> None:
    """Row: p p | a a a | b || q q q q | c c. With a window of 2 a segment gets its prompt's last key."""
    layout = LAYOUTS["two groups"]
    _, of_prompts = calls_at_once(layout, None, CPU)
    assert of_prompts.queries.tolist() == [2, 3, 4, 5, 10, 11] and of_prompts.keys.tolist() == [0, 1, 6, 7, 8, 9]
    assert [places.tolist() for places in of_prompts.sequences[:2]] == [[0, 4, 6], [0, 2, 6]]
    (windowed,) = calls_at_once(layout, 2, CPU)
    assert windowed.keys.tolist() == [0, 1] + [1, 2, 3, 4] + [1, 5] + [6, 7, 8, 9] + [9, 10, 11]
    assert windowed.sequences[1].tolist() == [0, 2, 6, 8, 12, 15] and windowed.window == 2


# -- The flash kernel, replaced by a plain computation of the same values


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_merged_flash_calls_are_the_loop_over_segments(
    monkeypatch: pytest.MonkeyPatch, layout: SegmentLayout, window: int | None
) -> None:
    """Outputs and gradients: the keys that are read, the lengths and the options say the same as the loop. Keys are
    handed on with their own number of heads, also where `torch.nn.attention.varlen` takes no grouped ones (torch 2.11).
    """
    heads: set[tuple[int, int]] = set()

    def forward(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> Any:
        heads.add((q.shape[1], k.shape[1]))
        return flash_forward(q, k, *rest, **options)

    monkeypatch.setattr(merged_attention, "kernels", lambda: (forward, flash_backward))
    calls = calls_at_once(layout, window, CPU)
    found = attend_and_differentiate(merged(calls), layout)
    torch.testing.assert_close(found, attend_and_differentiate(loop_over_segments(layout, window), layout))
    assert len(calls) == (1 if window else 1 + max(map(len, layout.attends_to))) and heads == {(4, 2)}


@pytest.mark.parametrize("kernel", ["flash", "cpu"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_sinks_come_from_the_kernels_log_sum_exp(
    monkeypatch: pytest.MonkeyPatch, layout: SegmentLayout, window: int | None, kernel: str
) -> None:
    """Outputs and gradients, including the sinks', equal the loop over segments with the sink as an additional key."""
    monkeypatch.setattr(merged_attention, "kernels", lambda: KERNELS)
    results, ways = [], [attention._calls, lambda *row: ()]
    monkeypatch.setattr(attention, "flash_takes", lambda query: kernel == "flash")
    monkeypatch.setattr(attention, "_in_place_from", 0)
    for calls in ways:
        monkeypatch.setattr(attention, "_calls", calls)
        query, key, value = (x.requires_grad_() for x in random_qkv(layout.num_tokens))
        own = torch.linspace(-1, 1, query.shape[1]).requires_grad_()
        output, _ = attention.packed_attention(
            torch.nn.Module(), query, key, value, None, layout=layout, scaling=0.3, s_aux=own, sliding_window=window
        )
        output.mul(torch.arange(output.numel()).view_as(output) % 7).sum().backward()
        results.append((output, *(x.grad for x in (query, key, value, own))))
    torch.testing.assert_close(*results)


def test_a_model_with_sinks_has_them_in_a_plain_call_too() -> None:
    """Calls without packed rows, such as `generate`, apply the sinks too, also in a batch with padding on the left."""
    from row_cases import PACKED, make

    model = make(PACKED["gpt_oss"]).eval()
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    logits = []
    for name in ("eager", attention.NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits.append(model(input_ids=ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    "device, dtype, head, capability, taken",
    [
        ("cuda", torch.bfloat16, 128, (9, 0), True),
        ("cuda", torch.float16, 256, (8, 0), True),
        ("cuda", torch.float32, 128, (9, 0), False),
        ("cuda", torch.bfloat16, 288, (9, 0), False),
        ("cuda", torch.float16, 64, (7, 5), False),
        ("cpu", torch.bfloat16, 128, (9, 0), False),
    ],
)
def test_what_the_flash_kernel_takes(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    head: int,
    capability: tuple[int, int],
    taken: bool,
) -> None:
    monkeypatch.setattr(attention, "_capability", lambda device: capability)
    query = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, shape=(1, 4, 9, head), device=torch.device(device))
    assert attention.flash_takes(query) == taken  # type: ignore[arg-type]


def test_a_float32_policy_under_autocast_takes_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings leave its queries and keys in float32, its values are bfloat16."""
    calls: list[torch.dtype] = []

    def count(*args: Any, **options: Any) -> Any:
        calls.append(args[0].dtype)
        return flash_forward(*args, **options)

    model, (row,) = packed_copy(make_model("llama")), pack(make_groups(), 1000, False, CPU)
    monkeypatch.setattr(attention, "_calls", lambda *given: ())
    with torch.autocast("cpu", torch.bfloat16):
        looped, _ = policy_logprobs(model, row, 1.0)
    monkeypatch.undo()
    monkeypatch.setattr(merged_attention, "kernels", lambda: (count, flash_backward))
    monkeypatch.setattr(attention, "flash_takes", lambda query: query.dtype.itemsize == 2)
    with torch.autocast("cpu", torch.bfloat16):
        flash, _ = policy_logprobs(model, row, 1.0)
    assert calls == [torch.bfloat16] * 2 * model.config.num_hidden_layers
    assert float((flash - looped).detach().abs().mean()) < 0.05


def test_a_cpu_reads_keys_in_place_where_prompts_are_long() -> None:
    """Keys are read in place if prompts are long on average over the row's completions."""
    query = torch.zeros(1, 1, 1, 8)
    limit = attention.IN_PLACE_FROM
    for prompts, in_place in (((limit - 1,), False), ((limit,), True), ((1, 2 * limit), True), ((1, limit), False)):
        lengths = [n for prompt in prompts for n in (prompt, 3, 3)]
        sees = [seen for place in range(0, len(lengths), 3) for seen in ((), (place,), (place,))]
        assert bool(attention._calls(query, query, SegmentLayout(tuple(lengths), tuple(sees)), None)) == in_place


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"softcap": 50.0}, {"sliding_window": 3}])
def test_what_no_kernel_merges_is_one_call_per_segment(monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]) -> None:
    monkeypatch.setattr(MergedAttention, "apply", lambda *given: pytest.fail("merged"))
    monkeypatch.setattr(attention, "_in_place_from", 0)
    layout = LAYOUTS["one group"]
    attention.packed_attention(torch.nn.Module(), *random_qkv(layout.num_tokens), None, layout=layout, **option)


def test_where_a_mask_is_needed_on_a_gpu_the_heads_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's meta device stands for a GPU. With grouped heads a GPU would store all attention scores."""
    seen: list[tuple[int, ...]] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def watch(query: Any, key: Any, value: Any, enable_gqa: bool, **options: Any) -> Any:
        seen.append((query.shape[1], key.shape[1], value.shape[1], enable_gqa))
        return own(query, key, value, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    layout = LAYOUTS["one group"]
    for device, keys in (("meta", 4), ("cpu", 2)):
        seen.clear()
        query, key, value = (x.to(device) for x in random_qkv(layout.num_tokens))
        attention._segment_attention(query, key, value, layout, (None, 0.0, None), None)
        assert seen == [(4, keys, keys, keys == 2)] * 3, device


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_gpu_computes_what_a_dense_mask_does(layout: SegmentLayout, dtype: torch.dtype, window: int | None) -> None:
    query, key, value = (x.to("cuda", dtype) for x in random_qkv(layout.num_tokens))
    found, _ = attention.packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, layout=layout
    )
    torch.testing.assert_close(
        found.float().cpu(), dense(layout, window), atol=0.03 if dtype == torch.bfloat16 else 1e-4, rtol=0.0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [4, 2])
def test_a_gpu_s_gradients_are_the_loop_s(keys: int) -> None:
    """Gradients equal the loop's. With equal heads and long prompts torch 2.14's own interface would call cuDNN."""
    layout, generator = SegmentLayout((256, 160, 160), ((), (0,), (0,))), torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, layout.num_tokens, 64, generator=generator).bfloat16() for heads in (4, keys, keys)]
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        inputs = [x.to(device, dtype).requires_grad_() for x in made]
        if device == "cuda":
            output, _ = attention.packed_attention(torch.nn.Module(), *inputs, None, layout=layout)
        else:
            output = attention._segment_attention(*inputs, layout, (None, 0.0, None), None)
        output.float().square().sum().backward()
        results.append([output, *(x.grad for x in inputs)])
    assert all(relative_error(a.float().cpu(), b) < 0.03 for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_of_a_shared_prompt_repeat(deterministic: bool) -> None:
    """Many completions add to one prompt's keys. Bit for bit under `full_determinism`, else up to rounding."""
    layout = SegmentLayout((64, *(32,) * 32), ((), *((0,),) * 32))
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, layout.num_tokens, 64, generator=generator) for heads in (8, 2, 2)]
    gradients = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(4):
            inputs = [x.to("cuda", torch.bfloat16).requires_grad_() for x in made]
            output, _ = attention.packed_attention(torch.nn.Module(), *inputs, None, layout=layout)
            output.float().square().sum().backward()
            gradients.append(torch.cat([x.grad.float().flatten() for x in inputs]))
    finally:
        torch.use_deterministic_algorithms(False)
    spread = max(relative_error(found, gradients[0]) for found in gradients[1:])
    print(f"relative spread of the gradients: {spread:.2g}")
    assert spread == 0.0 if deterministic else spread < 0.01


@pytest.mark.gpu
def test_a_float32_policy_under_autocast_needs_no_scores_on_a_gpu() -> None:
    """8 completions of 1,024 tokens on a prompt of 512: all scores would be 8 x 12 x 1,024 x 1,536 numbers."""
    layout = SegmentLayout((512, *(1024,) * 8), ((), *((0,),) * 8))
    query, key, value = (
        torch.randn(1, heads, layout.num_tokens, 64, device="cuda", requires_grad=True) for heads in (12, 2, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        output, _ = attention.packed_attention(torch.nn.Module(), query, key, value.bfloat16(), None, layout=layout)
    output.float().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * query.nbytes  # 320 MB; the scores would be 604


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_any_other_forward_is_transformers_own(family: str) -> None:
    """`generate`, padded batches and plain calls of a model with packed rows work as in transformers."""
    own = make_model(family).eval()
    packed = packed_copy(own)
    ids = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded to the left, as for `generate`
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = own.generate(input_ids=ids, attention_mask=mask, **settings)
    assert torch.equal(packed.generate(input_ids=ids, attention_mask=mask, **settings), expected)
    torch.testing.assert_close(packed(input_ids=ids).logits, own(input_ids=ids).logits)

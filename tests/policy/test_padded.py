"""Models that can't take packed rows run padded ones: which they are, and that these equal the models' own computation.

The reference is each model run on one sequence at a time, nothing packed and nothing padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from needs import case
from row_cases import MIXTURES, PACKED, RECURRENT, SHAPE, VOCABULARY, make, make_groups

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup, SegmentLayout
from colograd.policy import attention, row_proof
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack
from colograd.policy.padded import rows_of
from colograd.policy.row_proof import choose_rows, choose_rows_where_it_trains

PADDED: dict[str, tuple[Callable[[], Any], str]] = {
    "state space": (
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8)
        ),
        "packed log-probabilities differ",  # its scan takes no state to begin with
    ),
    "biases by distance": (
        lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4)),
        "doesn't use transformers' attention interface",
    ),
    "a window that the attention isn't told": (
        lambda: hf.Qwen2MoeForCausalLM(
            hf.Qwen2MoeConfig(
                **SHAPE, num_experts=4, use_sliding_window=True, sliding_window=20, max_window_layers=1
            )
        ),
        "doesn't pass the window of 20 tokens to its attention",
    ),
}  # fmt: skip
# Of docs/models.md's families.
IN_TABLE = {
    "a window that the attention isn't told": ("qwen2_moe", "where it has a window"),
}


def own_loss(model: Any, groups: list[ScoredGroup]) -> torch.Tensor:
    total = torch.zeros(())
    for group in groups:
        for rollout, advantage in zip(group.group.rollouts, group.advantages, strict=True):
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
            logprobs = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
            total = total - advantage * logprobs.gather(1, ids[0, len(rollout.prompt_ids) :, None]).sum()
    return total


def our_loss(model: Any, groups: list[ScoredGroup], budget: int, share_prompts: bool) -> torch.Tensor:
    rows = pack(groups, budget, False, torch.device("cpu"), share_prompts)
    return sum((-(row.advantages * policy_logprobs(model, row, 1.0)[0]).sum() for row in rows), torch.zeros(()))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-8))


def compare(model: Any, budget: int, share_prompts: bool, own: str) -> None:
    """Compare our loss and every gradient with the model's own."""
    groups, chosen = make_groups(), model.config._attn_implementation
    loss = our_loss(model, groups, budget, share_prompts)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation(own)
    expected = own_loss(model, groups)
    expected.backward()
    model.set_attn_implementation(chosen)
    assert relative_error(loss.detach(), expected.detach()) < 1e-4
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert found[name] is None, name
        else:
            assert relative_error(found[name], parameter.grad) < 1e-4, name


@pytest.mark.parametrize("budget", [1000, 25], ids=["one batch", "several"])
@pytest.mark.parametrize("kind", [case(kind, *(("hybrids",) if kind == "state space" else ())) for kind in PADDED])
def test_what_cannot_be_packed_is_padded_and_equals_the_models_own_computation(
    kind: str, budget: int, tried: Any
) -> None:
    build, reason = PADDED[kind]
    model = make(build)
    assert reason in choose_rows(model) and model.training
    own = model.config._attn_implementation
    assert own != attention.NAME
    compare(model, budget, share_prompts=False, own=own)
    if kind in IN_TABLE:
        family, why = IN_TABLE[kind]
        tried(family, padded=why)


@pytest.mark.parametrize("kind", [*PACKED, *(case(kind, "hybrids") for kind in RECURRENT)])
def test_what_can_be_packed_is(kind: str, tried: Any) -> None:
    model = make({**PACKED, **RECURRENT}[kind])
    assert choose_rows(model) == "" and model.training
    assert model.config._attn_implementation == attention.NAME
    compare(model, 1000, share_prompts=True, own="eager")
    if kind not in ("gpt2", "granite"):
        tried(kind, "packed")


@pytest.mark.parametrize("share_prompts", [True, False], ids=["shared prompts", ""])
@pytest.mark.parametrize("kind", ["llama", *MIXTURES])
def test_what_is_forced_into_padded_rows_gives_the_packed_result(
    kind: str, share_prompts: bool, monkeypatch: Any, tried: Any
) -> None:
    """A row's shared prompts work too:"""
    model, packed = make(PACKED[kind]), make(PACKED[kind])
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    assert "doesn't use" in choose_rows(model)
    compare(model, 40, share_prompts, own=model.config._attn_implementation)
    packed.set_attn_implementation(attention.NAME)
    groups = make_groups()
    ours, theirs = our_loss(model, groups, 40, share_prompts), our_loss(packed, groups, 1000, True)
    model.zero_grad()
    ours.backward()
    theirs.backward()
    assert relative_error(ours.detach(), theirs.detach()) < 1e-5
    for (name, padded), other in zip(model.named_parameters(), packed.parameters(), strict=True):
        if other.grad is None:
            assert padded.grad is None, name
        else:
            assert relative_error(padded.grad, other.grad) < 1e-4, name
    tried(kind, padded="where forced")


def test_logits_that_no_known_transform_gives_are_refused() -> None:
    """A scale after the head that `logprobs` doesn't know shows at once, packed or padded."""
    model = make(PACKED["llama"])
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden) * 1.5
    with pytest.raises(ValueError, match=r"LlamaForCausalLM can't be trained \(.*nats from its own logits\)"):
        choose_rows(model)


def test_a_leak_between_the_segments_of_a_row_shows() -> None:
    """The model claims the attention interface, but mixes tokens outside of attention too."""
    model = make(PACKED["llama"])
    model.model.layers[0].register_forward_hook(lambda module, args, out: out + 0.5 * out.cumsum(1))
    assert "packed log-probabilities differ" in choose_rows(model)
    assert model.config._attn_implementation == "sdpa"


def test_bfloat16_rounding_is_no_obstacle() -> None:
    model = make(PACKED["llama"]).to(torch.bfloat16)
    assert choose_rows(model) == ""


def test_under_autocast_the_rounding_is_that_of_16_bits() -> None:
    model = make(PACKED["llama"])
    with torch.autocast("cpu", torch.bfloat16):
        assert choose_rows(model) == ""


@pytest.mark.parametrize("kernel", ["_segment_attention", "calls_one_by_one"])
def test_rows_that_fail_the_training_kernel_are_padded(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """The rows pass when the model is loaded. Then a 16-bit kernel loses the prompt. The reference changes to the same
    rows, and so does a rank with a correct kernel."""
    own = getattr(attention, kernel)

    def forgetful(*given: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            layouts = (x for x in given if isinstance(x, SegmentLayout))
            alone = {layout: SegmentLayout(layout.lengths, ((),) * len(layout.lengths)) for layout in layouts}
            given = tuple(alone.get(x, x) if isinstance(x, SegmentLayout) else x for x in given)
        return own(*given)

    monkeypatch.setattr(attention, kernel, forgetful)
    model, reference = make(PACKED["llama"]), make(PACKED["llama"])
    assert choose_rows(model) == choose_rows(reference) == "" == choose_rows_where_it_trains(model, model.device)
    with torch.autocast("cpu", torch.bfloat16):
        why = choose_rows_where_it_trains(model, model.device, [reference])
    assert "packed log-probabilities differ by" in why and why.endswith("on cpu")
    assert model.config._attn_implementation == reference.config._attn_implementation == "sdpa"
    other = make(PACKED["llama"])
    monkeypatch.setattr(row_proof, "gather", lambda own: [own, why])
    assert choose_rows_where_it_trains(other, other.device) == why
    assert other.config._attn_implementation == "sdpa"


def test_ranks_with_different_rows_make_equal_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that pads already takes part when the other rank changes to padded rows."""
    entered: list[str] = []

    @contextmanager
    def collective(what: str) -> Iterator[None]:
        entered.append(what)
        yield

    monkeypatch.setattr(row_proof, "on_all_ranks", collective)
    monkeypatch.setattr(row_proof, "gather", lambda own: ["", "a reason"])
    for found in ("", "a reason"):
        monkeypatch.setattr(row_proof, "choose_rows", lambda *given, found=found, **more: found)
        assert choose_rows_where_it_trains(None, torch.device("cpu")) == "a reason"
    assert len(entered) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_the_flash_kernel_is_proved(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    calls, own = [], attention.run_merged
    monkeypatch.setattr(attention, "run_merged", lambda *a: calls.append(a[0].dtype) or own(*a))
    model = make(PACKED["llama"]).to("cuda", dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
        assert choose_rows_where_it_trains(model, model.device) == ""
    assert set(calls) == {torch.bfloat16}


def test_a_model_chosen_once_can_be_chosen_again() -> None:
    model = make(PACKED["llama"])
    assert choose_rows(model) == choose_rows(model) == ""


def test_the_rows_of_a_layout() -> None:
    """p p p | a a | b b b b: two sequences; the prompt's place is in the first."""
    rows = rows_of(SegmentLayout((3, 2, 4), ((), (0,), (0,))))
    assert rows.tokens.tolist() == [[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 5, 6, 7, 8]]
    assert rows.lengths.tolist() == [5, 7]
    assert rows.places.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13]


def test_the_rows_of_a_conversation_whose_turns_see_each_other() -> None:
    rows = rows_of(SegmentLayout((2, 1, 2), ((), (0,), (0, 1))))
    assert rows.tokens.tolist() == [[0, 1, 2, 3, 4]] and rows.places.tolist() == [0, 1, 2, 3, 4]


def test_the_sample_of_the_proof_has_distinct_completions() -> None:
    """`_in_order` recognises completions by their tokens."""
    rollouts = [r for g in row_proof._samples(make(PACKED["llama"])) for r in g.group.rollouts]
    assert len({tuple(r.completion_ids) for r in rollouts}) == len(rollouts) == 4


@pytest.mark.parametrize("kind", ["llama", "state space"])
def test_differences_are_to_the_sampler_s_and_to_the_model_s_own(kind: str) -> None:
    """Two groups may have the same completion: each is compared after its own prompt."""
    model = {**PACKED, **{name: made for name, (made, _) in PADDED.items()}}[kind]()
    shared = not choose_rows(model.train())
    prompts, completion = ((5, 6, 7), (8, 9)), (3, 4)
    rollouts = [
        Rollout(prompt, completion, torch.full((2,), -1.0), torch.ones(2).bool(), FinishReason.STOP, 0)
        for prompt in prompts
    ]
    groups = [ScoredGroup(Group({}, (r, r), n), torch.zeros(2, 1), torch.ones(2)) for n, r in enumerate(rollouts)]
    rows = pack(groups, 1000, False, torch.device("cpu"), share_prompts=shared)
    chosen = model.config._attn_implementation
    to_sampler, to_own = row_proof.differences(model, rows, temperature=0.7)
    assert to_own.shape == to_sampler.shape == (8,) and to_own.max() < 1e-5
    model.eval()
    found = torch.cat([policy_logprobs(model, row, 0.7)[0] for row in rows])
    torch.testing.assert_close(to_sampler, (found + 1.0).abs().detach())
    assert model.config._attn_implementation == chosen

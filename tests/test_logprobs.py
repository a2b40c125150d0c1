"""Log-probabilities and entropies from the packed forward, against the full softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from colograd import attention, logprobs
from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.logprobs import label_logprobs, policy_logprobs
from colograd.packing import pack

VOCABULARY = 128
PLAIN = {"scale": 1.0, "softcap": 0.0}


def make_head(tokens: int = 50, bias: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(tokens, 16, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(VOCABULARY, 16, generator=generator).to(dtype).requires_grad_(),
        "bias": torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_() if bias else None,
        "labels": torch.randint(VOCABULARY, (tokens,), generator=generator),
    }


def full_softmax(head: dict[str, Any], temperature: float, scale: float = 1.0, softcap: float = 0.0) -> Any:
    """Log-probabilities of the labels and entropies, with all logits at once."""
    logits = torch.nn.functional.linear(head["hidden"], head["weight"], head["bias"]).float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(head["labels"]), distribution.entropy()


def gradients(logprob: torch.Tensor, head: dict[str, Any]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logprob))
    return list(
        torch.autograd.grad((weights * logprob).sum(), [t for t in head.values() if getattr(t, "requires_grad", 0)])
    )


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.25, 0.0), (1.0, 3.0), (0.5, 3.0)])
def test_values_and_gradients_equal_the_full_softmax(
    bias: bool, temperature: float, scale: float, softcap: float
) -> None:
    head = make_head(bias=bias)
    logprob, entropy = label_logprobs(**head, temperature=temperature, transform={"scale": scale, "softcap": softcap})
    expected, expected_entropy = full_softmax(head, temperature, scale, softcap)
    torch.testing.assert_close(logprob, expected)
    # log Z - E[logit] cancels where a distribution is nearly sure: right to the rounding of the largest logits.
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-4)
    assert not entropy.requires_grad
    for ours, theirs in zip(gradients(logprob, head), gradients(expected, head), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(tokens=50)  # 50 = 3 * 16 + 2: the last chunk is short
    whole, whole_entropy = label_logprobs(**head, temperature=0.9, transform=PLAIN)
    expected = gradients(whole, head)
    sizes: list[int] = []
    chunk = logprobs._chunk

    def counted(hidden: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(hidden))
        return chunk(hidden, *rest)

    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs, "_chunk", counted)
    parts, parts_entropy = label_logprobs(**head, temperature=0.9, transform=PLAIN)
    assert sizes == [16, 16, 16, 2]
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts_entropy, whole_entropy, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(parts, head), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(sizes) == 8  # each is recomputed once in the backward, so its logits weren't kept


def test_a_bfloat16_head_gives_float32_log_probabilities() -> None:
    head = make_head(dtype=torch.bfloat16)
    logprob, entropy = label_logprobs(**head, temperature=1.0, transform=PLAIN)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob, full_softmax(head, 1.0)[0])


def test_the_entropy_of_a_flat_distribution_is_log_v_and_of_a_sure_one_zero() -> None:
    labels = torch.tensor([3])
    flat = label_logprobs(torch.zeros(1, 4), torch.randn(VOCABULARY, 4), None, labels, 1.0, PLAIN)
    for found in (flat[1], -flat[0]):
        torch.testing.assert_close(found, torch.tensor([VOCABULARY]).float().log())
    sure = torch.zeros(VOCABULARY, 1)
    sure[3] = 200.0
    found, entropy = label_logprobs(torch.ones(1, 1), sure, None, labels, 1.0, PLAIN)
    assert found.tolist() == [0.0] and entropy.item() == pytest.approx(0, abs=1e-6)


def test_no_labels_give_empty_tensors_that_can_be_trained_on() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    logprob, entropy = label_logprobs(hidden, torch.zeros(8, 4), None, torch.zeros(0, dtype=torch.int64), 1.0, PLAIN)
    logprob.sum().backward()
    assert logprob.shape == entropy.shape == (0,) and hidden.grad is not None


# -- The whole model


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, attn_implementation=attention.NAME,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_row() -> Any:
    rollouts = tuple(
        Rollout((5, 6, 7), ids, torch.zeros(len(ids)), torch.ones(len(ids), dtype=torch.bool), FinishReason.STOP, 0)
        for ids in ((10, 11, 12), (20,))
    )
    group = ScoredGroup(Group({}, rollouts, 0), torch.zeros(2, 1), torch.ones(2))
    return pack([group], 100, False, torch.device("cpu"))[0]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_temperature_is_the_sampler_s(model: Any, temperature: float) -> None:
    row = make_row()
    with torch.no_grad():
        found, entropy = policy_logprobs(model, row, temperature)
        for index, ids in enumerate(((10, 11, 12), (20,))):
            whole = torch.tensor([[5, 6, 7, *ids]])
            distribution = torch.distributions.Categorical(logits=model(whole).logits[0, 2:-1] / temperature)
            mine = row.sequence == index
            torch.testing.assert_close(found[mine], distribution.log_prob(torch.tensor(ids)), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(entropy[mine], distribution.entropy(), rtol=1e-4, atol=1e-5)


def test_only_predicting_positions_reach_the_head(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row, seen = make_row(), []
    whole = logprobs.label_logprobs

    def look(hidden: torch.Tensor, *rest: Any) -> Any:
        seen.append(tuple(hidden.shape))
        return whole(hidden, *rest)

    monkeypatch.setattr(logprobs, "label_logprobs", look)
    policy_logprobs(model, row, 1.0)
    assert seen == [(4, 64)]  # 3 + 1 completion tokens, of the row's 7


def test_more_than_one_row_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="takes one row, not 2"):
        model(torch.ones(2, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"scale": 1.0, "softcap": 0.0}),
        ({"logits_scaling": 8.0}, {"scale": 1 / 8, "softcap": 0.0}),  # Granite divides
        ({"logit_scale": 0.0625}, {"scale": 0.0625, "softcap": 0.0}),  # Cohere multiplies
        ({"lm_head_multiplier": 0.25}, {"scale": 0.25, "softcap": 0.0}),  # Falcon-H1 multiplies
        ({"final_logit_softcapping": 30.0}, {"scale": 1.0, "softcap": 30.0}),  # Gemma 2
    ],
)
def test_what_an_architecture_does_to_its_logits_is_done(
    settings: dict[str, float], expected: dict[str, float]
) -> None:
    config = SimpleNamespace(**settings)
    config.get_text_config = lambda: config
    assert logprobs._logit_transform(SimpleNamespace(config=config)) == expected

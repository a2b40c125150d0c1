"""Log-probabilities and entropies from the packed forward, against the full softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.policy import attention, logprobs
from colograd.policy import head as policy_head
from colograd.policy.head import Head, product_dtype
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack
from colograd.runtime import cpu_products
from colograd.training.adamw_split import accumulate_in_float32

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


def label_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, temperature: float,
    transform: dict[str, float], entropy_gradient: bool = False, float32_products: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dtype = product_dtype(weight, hidden.device, float32_products)
    head = Head(temperature, dtype=dtype, wide=float32_products, **transform)
    return policy_head.label_logprobs(hidden, weight, bias, labels, head, entropy_gradient)


def full_softmax(head: dict[str, Any], temperature: float, scale: float = 1.0, softcap: float = 0.0) -> Any:
    """Log-probabilities of the labels and entropies, with all logits at once."""
    logits = torch.nn.functional.linear(head["hidden"], head["weight"], head["bias"]) * scale
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(head["labels"]), distribution.entropy()


def gradients(logprob: torch.Tensor, head: dict[str, Any]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logprob))
    return list(
        torch.autograd.grad((weights * logprob).sum(), [t for t in head.values() if getattr(t, "requires_grad", 0)])
    )


@pytest.fixture(autouse=True)
def multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the code for CPUs with bfloat16 products. Other CPUs are tested in test_cpu_products.py."""
    monkeypatch.setattr(cpu_products, "wanted", lambda: False)


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


@pytest.mark.parametrize("tile", [(1, 1), (3, 3), (16, 5), (50, VOCABULARY)], ids=str)
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int]) -> None:
    head = make_head(bias=True)  # 50 rows of 128 logits: the last tiles are short
    expected, expected_entropy = full_softmax(head, 0.9, 0.5, 4.0)
    seen: list[tuple[int, ...]] = []
    product = Head.product

    def counted(*args: Any) -> torch.Tensor:
        seen.append(tuple(product(*args).shape))
        return product(*args)

    monkeypatch.setattr(policy_head, "tile_shape", lambda labels, vocabulary, device: tile)
    monkeypatch.setattr(Head, "product", counted)
    found, entropy = label_logprobs(**head, temperature=0.9, transform={"scale": 0.5, "softcap": 4.0})
    tiles = -(-50 // tile[0]) * -(-VOCABULARY // tile[1])
    assert len(seen) == tiles and sum(rows * columns for rows, columns in seen) == 50 * VOCABULARY
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(found, head), gradients(expected, head), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(seen) == 2 * tiles  # each is computed again in the backward, so its logits weren't kept
    assert max(seen) <= tile


@pytest.mark.parametrize("labels", [1, 1200, 8192, 100_000])
@pytest.mark.parametrize("vocabulary", [258, 49_152, 151_936])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tile_is_never_larger_than_it_may_be(labels: int, vocabulary: int, device: str) -> None:
    rows, columns = policy_head.tile_shape(labels, vocabulary, torch.device(device))
    assert 1 <= rows <= labels and 1 <= columns <= vocabulary
    assert rows * columns <= policy_head.TILE_ELEMENTS[device]
    assert device == "cpu" or columns == vocabulary or columns % 64 == 0, "a GPU multiplies aligned rows"


@pytest.mark.parametrize("entropy_gradient", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("temperature", "scale", "softcap"),
    [(1.0, 1.0, 0.0), (0.7, 1.0, 0.0), (1.0, 0.3, 0.0), (1.0, 1.0, 2.0), (1.4, 0.5, 2.0)],
)
def test_the_gradient_is_the_derivative(
    monkeypatch: pytest.MonkeyPatch,
    bias: bool,
    temperature: float,
    scale: float,
    softcap: float,
    entropy_gradient: bool,
) -> None:
    """In float64 against finite differences, for every transform, over several tiles."""
    monkeypatch.setattr(policy_head, "tile_shape", lambda labels, vocabulary, device: (2, 3))
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 4), (7, 4)] + ([(7,)] if bias else [])
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    labels = torch.tensor([0, 6, 3, 3, 1])

    def differentiable(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        transform = {"scale": scale, "softcap": softcap}
        found = label_logprobs(hidden, weight, bias, labels, temperature, transform, entropy_gradient)
        assert found[1].requires_grad == entropy_gradient
        return found if entropy_gradient else found[0]

    assert torch.autograd.gradcheck(differentiable, given, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.7, 0.5, 0.0), (1.4, 0.5, 3.0)])
def test_the_entropy_s_gradient_is_that_of_the_full_softmax(
    monkeypatch: pytest.MonkeyPatch, bias: bool, temperature: float, scale: float, softcap: float
) -> None:
    """In float64 against autograd, alone and together with that of the log-probabilities."""
    monkeypatch.setattr(policy_head, "tile_shape", lambda labels, vocabulary, device: (16, 40))
    head = make_head(bias=bias, dtype=torch.float64)
    transform = {"scale": scale, "softcap": softcap}
    for share in (0.0, 0.3):
        expected = full_softmax(head, temperature, scale, softcap)
        found = label_logprobs(**head, temperature=temperature, transform=transform, entropy_gradient=True)
        torch.testing.assert_close(found, expected)
        ours, theirs = (gradients(share * logprob + entropy.square(), head) for logprob, entropy in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_a_second_derivative_is_refused() -> None:
    head = make_head(tokens=3)
    logprob, _ = label_logprobs(**head, temperature=1.0, transform=PLAIN)
    (first,) = torch.autograd.grad(logprob.square().sum(), head["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen: str) -> None:
    head = make_head(bias=True)
    expected = dict(zip(("hidden", "weight", "bias"), gradients(full_softmax(head, 1.0)[0], head), strict=True))
    head[frozen].requires_grad_(False)
    logprob, _ = label_logprobs(**head, temperature=1.0, transform=PLAIN)
    (torch.linspace(-1, 1, len(logprob)) * logprob).sum().backward()
    assert head[frozen].grad is None
    for name in expected.keys() - {frozen}:
        torch.testing.assert_close(head[name].grad, expected[name], rtol=1e-4, atol=1e-5)


def test_a_gradient_that_accumulates_in_float32_is_not_rounded_to_bfloat16() -> None:
    head = make_head(dtype=torch.bfloat16)
    weight = head["weight"] = torch.nn.Parameter(head["weight"].detach())
    accumulate_in_float32([weight])
    calls = 40  # of one label each: their sum in bfloat16 would be off by much more than one rounding
    for index in range(calls):
        part = {**head, "hidden": head["hidden"][index : index + 1], "labels": head["labels"][index : index + 1]}
        label_logprobs(**part, temperature=1.0, transform=PLAIN)[0].sum().backward()
    exact = {k: None if v is None else v[:calls] if k in ("hidden", "labels") else v for k, v in head.items()}
    exact = {k: v.detach().double().requires_grad_() if k in ("hidden", "weight") else v for k, v in exact.items()}
    logits = torch.nn.functional.linear(exact["hidden"], exact["weight"])
    logits.log_softmax(-1).gather(1, exact["labels"][:, None]).sum().backward()
    assert weight.grad.dtype == torch.float32
    error = (weight.grad - exact["weight"].grad).norm() / exact["weight"].grad.norm()
    assert error < 4e-3, error  # the logits' and the terms' own rounding, 2**-9 each


def checkpointed(head: dict[str, Any], rows: int = 16) -> torch.Tensor:
    """The older implementation: chunks of rows through plain autograd, each recomputed in the backward."""

    def chunk(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight).float()
        return logits.gather(1, labels[:, None]).squeeze(1) - logits.logsumexp(dim=-1)

    parts = zip(head["hidden"].split(rows), head["labels"].split(rows), strict=True)
    return torch.cat(
        [checkpoint(chunk, hidden, head["weight"], labels, use_reentrant=False) for hidden, labels in parts]
    )


def test_bfloat16_is_as_close_to_the_truth_as_plain_autograd_is() -> None:
    head = make_head(tokens=200, dtype=torch.bfloat16)
    wide = {k: v.detach().float().requires_grad_() if k in ("hidden", "weight") else v for k, v in head.items()}
    truth = gradients(full_softmax(wide, 1.0)[0], wide)
    ours = gradients(label_logprobs(**head, temperature=1.0, transform=PLAIN)[0], head)
    theirs = gradients(checkpointed(head), head)
    for exact, found, plain in zip(truth, ours, theirs, strict=True):
        error, allowed = (found.float() - exact).norm(), (plain.float() - exact).norm()
        assert error <= 1.05 * allowed, (error, allowed)


def test_under_autocast_a_float32_head_multiplies_in_bfloat16_and_keeps_float32_gradients() -> None:
    head = make_head(bias=True)
    cast = {k: v.detach().bfloat16() if k != "labels" else v for k, v in head.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = label_logprobs(**head, temperature=1.0, transform=PLAIN)
    assert found.dtype == torch.float32
    assert torch.equal(found, label_logprobs(**cast, temperature=1.0, transform=PLAIN)[0])
    expected = gradients(full_softmax(head, 1.0)[0], head)
    for ours, theirs in zip(gradients(found, head), expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_head_whose_products_are_float32_rounds_no_logit(bias: bool) -> None:
    """cast_lm_head_to_fp32: values as of the same numbers in float32, also under autocast; gradients no worse."""
    head = make_head(tokens=200, dtype=torch.bfloat16, bias=bias)
    wide = {k: v.detach().float().requires_grad_() if v is not None and k != "labels" else v for k, v in head.items()}
    expected, of_entropy = full_softmax(wide, 1.0)
    found, entropy = label_logprobs(**head, temperature=1.0, transform=PLAIN, float32_products=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, of_entropy)
    rounded, _ = label_logprobs(**head, temperature=1.0, transform=PLAIN)
    assert (rounded - expected).abs().mean() > 100 * (found - expected).abs().mean()
    truth, usual = gradients(expected, wide), gradients(rounded, head)
    for exact, ours, plain in zip(truth, gradients(found, head), usual, strict=True):
        assert ours.dtype == plain.dtype and (ours - exact).norm() <= 1.05 * (plain - exact).norm()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = label_logprobs(**wide, temperature=1.0, transform=PLAIN, float32_products=True)
    torch.testing.assert_close(cast, expected)


def test_a_bfloat16_head_gives_float32_log_probabilities() -> None:
    head = make_head(dtype=torch.bfloat16)
    logprob, entropy = label_logprobs(**head, temperature=1.0, transform=PLAIN)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob, full_softmax(head, 1.0)[0])


def test_entropy_extremes_are_zero_and_log_v() -> None:
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


def test_no_labels_give_the_head_a_zero_gradient() -> None:
    weight = torch.ones(8, 4, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64)
    label_logprobs(torch.zeros(0, 4), weight, None, labels, 1.0, PLAIN)[0].sum().backward()
    assert weight.grad is not None and not weight.grad.any()


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


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "gradient_checkpointing"])
def test_every_parameter_gets_the_gradient_of_plain_autograd(tied: bool, recompute: bool) -> None:
    torch.manual_seed(0)
    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, attn_implementation=attention.NAME,
        )
    ).train()  # fmt: skip
    row = make_row()
    full = small(row.input_ids, position_ids=row.position_ids, layout=row.layout).logits[0, row.logit_positions]
    full.log_softmax(-1).gather(1, row.labels[:, None]).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in small.named_parameters()}
    small.zero_grad()
    if recompute:
        small.gradient_checkpointing_enable({"use_reentrant": False})
    policy_logprobs(small, row, 1.0)[0].sum().backward()
    for name, parameter in small.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


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
    assert policy_head.logit_transform(SimpleNamespace(config=config)) == expected

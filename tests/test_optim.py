"""AdamW on a split master: the same numbers as a float32 master, bit for bit."""

from __future__ import annotations

import io

import pytest
import torch

from colograd.optim import AdamWSplit, accumulate_in_float32, join_master, split_master


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def from_bits(*patterns: int) -> torch.Tensor:
    return torch.tensor([p - 2**32 if p >= 2**31 else p for p in patterns], dtype=torch.int32).view(torch.float32)


def random_masters() -> torch.Tensor:
    """Any 32 bits: both signs, denormals, infinities and NaN included."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (500_000,), generator=generator).to(torch.int32).view(torch.float32)


EDGES = from_bits(
    0x00000000, 0x80000000,  # zeros
    0x3F808000, 0xBF808000, 0x3F818000, 0xBF818000,  # ties, over an even and an odd bfloat16
    0x3F807FFF, 0x3F808001,  # just beside a tie
    0x3F7FFFFF, 0x3FFFFFFF,  # rounded up into the next power of two
    0x00000001, 0x80000001, 0x00008000, 0x80008000, 0x007FFFFF,  # denormals
    0x7F7F0000, 0x7F7FFFFF, 0xFF7FFFFF,  # the largest numbers: the last two round to infinity
    0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF,  # infinities, NaN
)  # fmt: skip


@pytest.mark.parametrize("masters", [EDGES, random_masters()], ids=["edges", "random"])
def test_splitting_and_joining_is_exact_for_every_pattern(masters: torch.Tensor) -> None:
    parameter, remainder = split_master(masters)
    assert (parameter.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(bits(join_master(parameter, remainder)), bits(masters))


@pytest.mark.parametrize("masters", [EDGES, random_masters()], ids=["edges", "random"])
def test_the_parameter_is_the_master_rounded_to_nearest_with_ties_away_from_zero(masters: torch.Tensor) -> None:
    toward_zero = (bits(masters) & ~0xFFFF).view(torch.float32)
    away = (bits(toward_zero) + 0x10000).view(torch.float32)
    finite = masters.isfinite() & away.isfinite()
    masters, toward_zero, away = masters[finite], toward_zero[finite], away[finite]
    exact = masters.double()
    nearest = torch.where((away.double() - exact).abs() <= (exact - toward_zero.double()).abs(), away, toward_zero)
    parameter, _ = split_master(masters)
    assert len(masters) > 10 and torch.equal(bits(parameter.float()), bits(nearest))
    # Only a tie may differ from torch's rounding, which goes to even.
    different = parameter != masters.bfloat16()
    assert ((bits(masters)[different] & 0xFFFF) == 0x8000).all()


def test_shape_and_order_survive_any_layout() -> None:
    masters = torch.randn(6, 4).t()
    parameter, remainder = split_master(masters)
    assert torch.equal(join_master(parameter, remainder), masters) and parameter.shape == masters.shape
    assert torch.equal(join_master(parameter.t().contiguous().t(), remainder), masters)


def make_parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((17, 5), (33,), ())
    parameters = [torch.nn.Parameter((0.05 * torch.randn(s, generator=generator)).bfloat16().to(dtype)) for s in shapes]
    accumulate_in_float32(parameters)
    return parameters


def take_steps(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Gradients depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def masters_of(parameters: list[torch.nn.Parameter], optimizer: AdamWSplit) -> list[torch.Tensor]:
    return [join_master(p.detach(), optimizer.state[p]["remainder"]) for p in parameters]


SETTINGS = {"lr": 1e-6, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def test_200_steps_equal_torch_s_adamw_on_a_float32_master_bit_for_bit() -> None:
    ours, theirs = make_parameters(), make_parameters(torch.float32)
    start = [p.detach().clone() for p in ours]
    split, plain = AdamWSplit(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS, foreach=False)
    take_steps(ours, split, range(200))
    take_steps(theirs, plain, range(200))
    for master, parameter, expected in zip(masters_of(ours, split), ours, theirs, strict=True):
        assert torch.equal(master, expected.detach())
        assert torch.equal(parameter.detach(), split_master(expected.detach())[0])
    # The reason for the master: at this rate most bfloat16 weights don't move, though every master does.
    moved = torch.cat([(a != b.detach()).flatten() for a, b in zip(start, ours, strict=True)])
    assert all((a.float() != b).any() for a, b in zip(start, masters_of(ours, split), strict=True))
    assert moved.float().mean() < 0.5


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    whole, half = make_parameters(), make_parameters()
    uninterrupted, first = AdamWSplit(whole, **SETTINGS), AdamWSplit(half, **SETTINGS)
    take_steps(whole, uninterrupted, range(20))
    take_steps(half, first, range(10))
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "parameters": [p.detach() for p in half]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_parameters()
    for parameter, value in zip(resumed, saved["parameters"], strict=True):
        parameter.data.copy_(value)
    second = AdamWSplit(resumed, lr=1.0)  # its settings come from the state
    second.load_state_dict(saved["optimizer"])
    for parameter in resumed:
        state = second.state[parameter]
        assert {name: value.dtype for name, value in state.items()} == {
            "step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "remainder": torch.int16,
        }  # fmt: skip
    take_steps(resumed, second, range(10, 20))
    for ours, expected in zip(masters_of(resumed, second), masters_of(whole, uninterrupted), strict=True):
        assert torch.equal(ours, expected)


def test_float32_parameters_equal_plain_adamw_beside_bfloat16_ones() -> None:
    mixed = [*make_parameters(), *make_parameters(torch.float32)]
    expected = make_parameters(torch.float32)
    plain = torch.optim.AdamW(expected, **SETTINGS, foreach=False)
    optimizer = AdamWSplit(mixed, **SETTINGS)
    take_steps(expected, plain, range(20))
    for step in range(20):  # both halves get the gradients of take_steps
        for half in (mixed[:3], mixed[3:]):
            generator = torch.Generator().manual_seed(100 + step)
            for parameter in half:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for ours, theirs in zip(mixed[3:], expected, strict=True):
        assert torch.equal(ours, theirs) and "remainder" not in optimizer.state[ours]


def test_groups_have_their_own_settings_and_missing_gradients_are_skipped() -> None:
    frozen, decayed, plain = make_parameters()
    settings = [{"params": [frozen, decayed], "weight_decay": 0.5}, {"params": [plain], "lr": 0.0}]
    before = [p.detach().clone() for p in (frozen, decayed, plain)]
    optimizer = AdamWSplit(settings, lr=0.1)
    decayed.grad, plain.grad = torch.zeros(decayed.shape), torch.ones(plain.shape)
    optimizer.step()
    assert torch.equal(frozen, before[0]) and frozen not in optimizer.state
    torch.testing.assert_close(masters_of([decayed], optimizer)[0], before[1].float() * (1 - 0.1 * 0.5))
    assert torch.equal(plain, before[2])


def test_gradients_of_bfloat16_parameters_accumulate_in_float32() -> None:
    """A bfloat16 sum of 1 and sixteen times 2^-9 stays 1; the float32 one doesn't."""
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    other = torch.nn.Parameter(torch.ones(()))
    assert accumulate_in_float32([weight, other])
    for factor in [1.0] + [2.0**-9] * 16:
        (weight * torch.tensor(factor, dtype=torch.bfloat16) + other).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert weight.grad.item() == 1 + 16 * 2.0**-9
    assert other.grad is not None and other.grad.item() == 17


def test_a_torch_that_cannot_accumulate_in_float32_is_told() -> None:
    class Old:
        requires_grad, dtype = True, torch.bfloat16

    assert accumulate_in_float32([Old()]) is False  # type: ignore[list-item]

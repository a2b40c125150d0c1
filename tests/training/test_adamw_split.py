"""AdamW on a split master: the same numbers as a float32 master, bit for bit; up to rounding if compiled."""

from __future__ import annotations

import copy
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file

from colograd.sharding.strategy import Owned
from colograd.sharding.weight_files import float32_weights
from colograd.training import adamw_split as optim
from colograd.training.adamw_split import (
    AdamWSplit,
    accumulate_in_float32,
    adopt_masters,
    join_master,
    join_remainders,
    optimizer_of,
    split_master,
)


def master_of(optimizer: AdamWSplit, parameter: torch.Tensor) -> torch.Tensor:
    """The optimizer's float32 value of a parameter."""
    remainder = optimizer.state[parameter].get("remainder")
    return parameter.detach().clone() if remainder is None else join_master(parameter.detach(), remainder)


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
def test_masters_round_to_nearest_ties_away_from_zero(masters: torch.Tensor) -> None:
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


Shapes = tuple[tuple[int, ...], ...]
SMALL: Shapes = ((17, 5), (33,), ())


def make_parameters(dtype: torch.dtype = torch.bfloat16, shapes: Shapes = SMALL) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter((0.05 * torch.randn(s, generator=generator)).bfloat16().to(dtype)) for s in shapes]
    accumulate_in_float32(parameters)
    return parameters


def take_steps(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take optimizer steps. A step's gradients depend only on the step's number."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def masters_of(parameters: list[torch.nn.Parameter], optimizer: AdamWSplit) -> list[torch.Tensor]:
    return [join_master(p.detach(), optimizer.state[p]["remainder"]) for p in parameters]


SETTINGS = {"lr": 1e-6, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("shapes", "steps"), [(SMALL, 1000), (((2**18 + 13,), (3, 2**18)), 10)], ids=["1000 steps", "several pieces"]
)
def test_steps_equal_torch_s_adamw_on_a_float32_master_bit_for_bit(
    shapes: Shapes, steps: int, weight_decay: float
) -> None:
    settings = SETTINGS | {"weight_decay": weight_decay}
    ours, theirs = make_parameters(shapes=shapes), make_parameters(torch.float32, shapes)
    start = [p.detach().clone() for p in ours]
    split, plain = AdamWSplit(ours, **settings), torch.optim.AdamW(theirs, **settings)
    take_steps(ours, split, range(steps))
    take_steps(theirs, plain, range(steps))
    for master, parameter, expected in zip(masters_of(ours, split), ours, theirs, strict=True):
        assert torch.equal(master, expected.detach())
        assert torch.equal(parameter.detach(), split_master(expected.detach())[0])
    # The reason for the master: at this rate most bfloat16 weights don't move, though every master does.
    moved = torch.cat([(a != b.detach()).flatten() for a, b in zip(start, ours, strict=True)])
    assert all((a.float() != b).any() for a, b in zip(start, masters_of(ours, split), strict=True))
    assert moved.float().mean() < 0.5 or steps == 1000
    # 10 bytes of state for each element, and a step count for each tensor
    state = [value for p in ours for name, value in split.state[p].items() if name != "step"]
    assert sum(value.nbytes for value in state) == 10 * sum(p.numel() for p in ours)
    assert all(split.state[p]["step"].item() == steps for p in ours)


def test_the_size_of_the_pieces_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((50_001,), (70, 71))
    whole, pieces = make_parameters(shapes=shapes), make_parameters(shapes=shapes)
    first, second = AdamWSplit(whole, **SETTINGS), AdamWSplit(pieces, **SETTINGS)
    take_steps(whole, first, range(5))
    monkeypatch.setattr(optim, "CPU_PIECE", 1024)
    take_steps(pieces, second, range(5))
    for a, b in zip(masters_of(whole, first), masters_of(pieces, second), strict=True):
        assert torch.equal(a, b)


def in_a_larger_tensor(values: torch.Tensor) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """A parameter that is the middle rows of a tensor three times as tall, as in a fused projection; and the tensor."""
    around = torch.full((3 * values.shape[0], *values.shape[1:]), 7.0, dtype=values.dtype)
    parameter = torch.nn.Parameter(around[values.shape[0] : 2 * values.shape[0]])
    parameter.data.copy_(values)
    accumulate_in_float32([parameter])
    return parameter, around


def test_a_slice_of_a_larger_tensor_is_written_in_place() -> None:
    alone = make_parameters()[:2]
    slices, around = zip(*(in_a_larger_tensor(p.detach()) for p in alone), strict=True)
    pointers = [p.data_ptr() for p in slices]
    first, second = AdamWSplit(alone, lr=0.1), AdamWSplit(slices, lr=0.1)
    take_steps(alone, first, range(3))
    take_steps(list(slices), second, range(3))
    for parameter, expected, pointer, outer in zip(slices, alone, pointers, around, strict=True):
        rows = len(parameter)
        assert parameter.data_ptr() == pointer == outer[rows:].data_ptr()
        assert torch.equal(parameter, expected) and torch.equal(outer[rows : 2 * rows], expected)
        assert (outer[:rows] == 7).all() and (outer[2 * rows :] == 7).all(), "the neighbours are left alone"


def test_a_parameter_of_any_layout_is_updated() -> None:
    plain = make_parameters()[0]
    turned = torch.nn.Parameter(plain.detach().t().contiguous().t())
    accumulate_in_float32([turned])
    first, second = AdamWSplit([plain], **SETTINGS), AdamWSplit([turned], **SETTINGS)
    take_steps([plain], first, range(5))
    take_steps([turned], second, range(5))
    assert not turned.is_contiguous() and torch.equal(turned, plain)
    assert torch.equal(master_of(second, turned), master_of(first, plain))


def test_bfloat16_gradients_are_taken_as_float32_ones() -> None:
    ours, theirs = make_parameters(), make_parameters(torch.float32)
    for parameter in ours:
        parameter.grad_dtype = torch.bfloat16
        parameter.grad = torch.full(parameter.shape, 0.3, dtype=torch.bfloat16)
    for parameter, half in zip(theirs, ours, strict=True):
        assert half.grad is not None
        parameter.grad = half.grad.float()
    split, plain = AdamWSplit(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    split.step()
    plain.step()
    for master, expected in zip(masters_of(ours, split), theirs, strict=True):
        assert torch.equal(master, expected)


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
    accumulate_in_float32([weight, other])
    for factor in [1.0] + [2.0**-9] * 16:
        (weight * torch.tensor(factor, dtype=torch.bfloat16) + other).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert weight.grad.item() == 1 + 16 * 2.0**-9
    assert other.grad is not None and other.grad.item() == 17


# -- compiled

LARGE: Shapes = ((300, 257), (70_001,), (33,), (5, 7), ())


def assert_equal_but_for_rounding(ours: list, split: AdamWSplit, theirs: list, plain: Any) -> None:
    for parameter, expected in zip(ours, theirs, strict=True):
        master = master_of(split, parameter)
        torch.testing.assert_close(master, expected.detach(), rtol=1e-6, atol=1e-12)
        assert torch.equal(parameter.detach(), split_master(master)[0])
        for name in optim.MOMENTS:  # an average of gradients of both signs, of size 1, may come close to zero
            torch.testing.assert_close(split.state[parameter][name], plain.state[expected][name], rtol=1e-6, atol=1e-6)


def test_compiled_steps_equal_torch_s_but_for_rounding(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = make_parameters(shapes=LARGE), make_parameters(torch.float32, LARGE)
    split, plain = AdamWSplit(ours, **SETTINGS, compiled=True), torch.optim.AdamW(theirs, **SETTINGS)
    for step in range(100):
        for optimizer, parameters in ((split, ours), (plain, theirs)):
            optimizer.param_groups[0]["lr"] = 1e-6 * (1 + step % 3)
            take_steps(parameters, optimizer, range(step, step + 1))
    assert "can't be compiled" not in caplog.text
    assert_equal_but_for_rounding(ours, split, theirs, plain)
    state = [value for p in ours for name, value in split.state[p].items() if name != "step"]
    assert sum(value.nbytes for value in state) == 10 * sum(p.numel() for p in ours)


def test_compiled_steps_write_slices_of_larger_tensors_and_take_bfloat16_gradients() -> None:
    alone = make_parameters(shapes=LARGE[:4])
    slices, around = zip(*(in_a_larger_tensor(p.detach()) for p in alone), strict=True)
    first, second = AdamWSplit(alone, lr=0.1), AdamWSplit(slices, lr=0.1, compiled=True)
    for parameter in (*alone, *slices):
        parameter.grad_dtype = torch.bfloat16
        parameter.grad = torch.full(parameter.shape, 0.3, dtype=torch.bfloat16)
    for _ in range(3):
        first.step()
        second.step()
    for parameter, expected, outer in zip(slices, alone, around, strict=True):
        torch.testing.assert_close(master_of(second, parameter), master_of(first, expected), rtol=1e-6, atol=1e-12)
        rows = len(parameter)
        assert torch.equal(outer[rows : 2 * rows], parameter)
        assert (outer[:rows] == 7).all() and (outer[2 * rows :] == 7).all()


def test_a_gpu_s_pass_is_compiled_once_for_all_shapes_and_rates() -> None:
    """The GPU's compiled function can be compiled for a CPU too. Its graphs are counted and its results compared."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    ours, theirs = make_parameters(shapes=LARGE), make_parameters(torch.float32, LARGE)
    split, plain = AdamWSplit(ours, **SETTINGS, compiled=True), torch.optim.AdamW(theirs, **SETTINGS)
    for step, rate in enumerate((1e-6, 3e-6, 1e-5)):
        for optimizer, parameters in ((split, ours), (plain, theirs)):
            optimizer.param_groups[0]["lr"] = rate
            take_steps(parameters, optimizer, range(step, step + 1))
    assert counters["stats"]["unique_graphs"] == 1
    assert_equal_but_for_rounding(ours, split, theirs, plain)
    # A place within a larger tensor is one more, whatever the place.
    slices = [in_a_larger_tensor(p.detach())[0] for p in ours[:4]]
    take_steps(slices, AdamWSplit(slices, **SETTINGS, compiled=True), range(2))
    assert counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


def test_an_uncompilable_step_warns_once_and_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(optim, "compiled_step", fails)
    ours, theirs = make_parameters(), make_parameters()
    first, second = AdamWSplit(ours, **SETTINGS, compiled=True), AdamWSplit(theirs, **SETTINGS, compiled=False)
    with caplog.at_level(logging.WARNING):
        take_steps(ours, first, range(3))
        take_steps(theirs, second, range(3))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("adamw_split: its step can't be compiled for cpu (no compiler)")
    assert all(torch.equal(a, b) for a, b in zip(masters_of(ours, first), masters_of(theirs, second), strict=True))


MODEL = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("given", "compiled"), [(None, None), ("", None), ("compiled=true", True), ("compiled = False", False)]
)
def test_optim_args_say_whether_steps_are_compiled(
    tmp_path: Path, given: str | None, compiled: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path, optim="adamw_split", optim_args=given)
    made = optimizer_of(config, MODEL)
    assert made is not None and made[0] is AdamWSplit
    assert made[1]["compiled"] is (None if compiled else compiled), "a CPU's steps are torch's"
    monkeypatch.setattr(type(config), "on_cpu", property(lambda self: False))
    assert optimizer_of(config, MODEL)[1]["compiled"] is compiled


def test_compiled_has_no_effect_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = optimizer_of(tiny.config(tmp_path, optim="adamw_split", optim_args="compiled=true"), MODEL)
    assert made is not None and made[1]["compiled"] is None
    assert "compiled=true has no effect on a CPU" in caplog.text


@pytest.mark.parametrize("given", ["compiled", "compiled=maybe", "fused=true", "compiled=true,lr=1"])
def test_other_optim_args_are_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ValueError, match=f"`optim_args` is '{given}', which `optim: adamw_split` doesn't know: set"):
        optimizer_of(tiny.config(tmp_path, optim="adamw_split", optim_args=given), MODEL)
    assert optimizer_of(tiny.config(tmp_path, optim="adamw_torch", optim_args=given), MODEL) is None, (
        "transformers' own"
    )


# -- float32 checkpoints, and to float32


def test_a_float32_run_goes_on_with_split_masters_bit_for_bit() -> None:
    whole = make_parameters(torch.float32)
    plain = torch.optim.AdamW(whole, **SETTINGS)
    take_steps(whole, plain, range(10))
    weights = {str(i): p.detach().clone() for i, p in enumerate(whole)}
    ours = [torch.nn.Parameter(p.detach().bfloat16()) for p in whole]  # as from_pretrained would: ties to even
    accumulate_in_float32(ours)
    split = AdamWSplit(ours, lr=1.0)
    split.load_state_dict(copy.deepcopy(plain.state_dict()))  # both go on, and loading copies nothing
    assert split.param_groups[0].keys() == {"params", *SETTINGS} and split.param_groups[0]["lr"] == SETTINGS["lr"]
    owned = [Owned(str(i), p, 0, p.numel()) for i, p in enumerate(ours)]
    adopt_masters(split, owned, [*weights.items(), ("elsewhere", torch.ones(1))])
    for master, parameter, expected in zip(masters_of(ours, split), ours, whole, strict=True):
        assert torch.equal(master, expected) and torch.equal(parameter, split_master(expected.detach())[0])
    take_steps(ours, split, range(10, 20))
    take_steps(whole, plain, range(10, 20))
    assert all(torch.equal(a, b) for a, b in zip(masters_of(ours, split), whole, strict=True))


@pytest.mark.parametrize(
    ("kind", "extra"), [(torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}), (AdamWSplit, {})]
)
def test_a_split_run_goes_on_in_float32_bit_for_bit(kind: Any, extra: dict[str, Any]) -> None:
    ours = make_parameters()
    split = AdamWSplit(ours, **SETTINGS)
    take_steps(ours, split, range(10))
    file = io.BytesIO()
    torch.save(split.state_dict(), file)
    file.seek(0)
    whole = [torch.nn.Parameter(p.detach().float()) for p in ours]
    plain = kind(whole, lr=1.0, **extra)
    plain.load_state_dict(torch.load(file, weights_only=True))
    join_remainders(plain)
    for parameter, master in zip(whole, masters_of(ours, split), strict=True):
        assert torch.equal(parameter, master) and plain.state[parameter].keys() == {"step", *optim.MOMENTS}
    group = plain.param_groups[0]
    assert group["lr"] == SETTINGS["lr"] and group.get("fused") == extra.get("fused")
    take_steps(whole, plain, range(10, 20))
    if not extra:  # torch's fused kernel rounds otherwise
        take_steps(ours, split, range(10, 20))
        assert all(torch.equal(a, b) for a, b in zip(masters_of(ours, split), whole, strict=True))


def test_what_needs_no_remainder_keeps_its_state() -> None:
    """torch's AdamW drops the remainder of a bfloat16 parameter, AdamWSplit keeps it."""
    ours = make_parameters()
    split = AdamWSplit(ours, **SETTINGS)
    take_steps(ours, split, range(2))
    before = masters_of(ours, split)
    join_remainders(split)
    assert all(torch.equal(a, b) for a, b in zip(masters_of(ours, split), before, strict=True))
    halves = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    plain = torch.optim.AdamW(halves)
    plain.load_state_dict(split.state_dict())
    join_remainders(plain)
    assert all("remainder" not in plain.state[p] for p in halves)
    assert all(torch.equal(a, b) for a, b in zip(halves, ours, strict=True))


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    parameters = make_parameters(torch.float32)
    other = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    take_steps(parameters, other, range(1))
    with pytest.raises(ValueError, match=r"\(momentum_buffer\) lacks values that .* needs: .* Resume with the `optim`"):
        AdamWSplit(make_parameters()).load_state_dict(other.state_dict())


@pytest.mark.parametrize("sharded", [False, True])
def test_float32_weights_are_read_from_one_file_or_shards(tmp_path: Path, sharded: bool) -> None:
    weights = {"a": torch.randn(3, 2), "b": torch.randn(5), "half": torch.ones(2, dtype=torch.bfloat16)}
    if sharded:
        places = {"a": "model-1.safetensors", "half": "model-1.safetensors", "b": "model-2.safetensors"}
        for file in set(places.values()):
            save_file({name: weights[name] for name in places if places[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(weights, tmp_path / "model.safetensors")
    found = dict(float32_weights(tmp_path))
    assert found.keys() == {"a", "b"} and all(torch.equal(found[name], weights[name]) for name in found)


def test_a_checkpoint_without_safetensors_has_no_float32_weights(tmp_path: Path) -> None:
    assert list(float32_weights(tmp_path)) == []

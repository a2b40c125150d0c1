"""In the passes of a micro-batch the host never waits for the device, and sends it one small tensor at most.

Seen on a CPU: the model and its rows are on torch's device without data (`meta`), where asking for a value is an error:
`item`, a condition on a tensor, boolean indexing. What is copied there from the host is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import attention_cases
import pytest
import torch
from loss_cases import KNOBS, kl_term
from needs import has
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colograd.batch import LossOutput, MicroBatch, StepBatch, StepConstants
from colograd.losses.objective import Objective, SamplerCorrection
from colograd.losses.token_losses import LOSSES, TokenLoss
from colograd.policy import attention
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import collate, dummy, pack, plan_rows
from colograd.reporting.metrics import Metrics, numbers
from colograd.training.learner import loss_pass

META = torch.device("meta")
EVERYTHING: dict[str, Any] = {
    "correction": SamplerCorrection("sequence_mask", 0.5, 2.0),
    "off_policy_threshold": 0.1,
    "terms": (kl_term(0.1),) if has("reference") else (),
    "entropy_bonus": True,
    "top_entropy_quantile": 0.2,
}


class Sent(TorchDispatchMode):
    """Counts what is copied from the host to the device without data."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "cpu" in _devices((args, kwargs)) and "meta" in _devices(out):
            self.copies.append(str(func))
        return out


def _devices(values: Any) -> set[str]:
    return {value.device.type for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """The `meta` device, faked as a GPU with a flash kernel that computes nothing."""
    own = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **k: contextlib.nullcontext() if kind == "meta" else own(kind, **k)
    )

    monkeypatch.setattr(attention, "flash_takes", lambda query: True)
    with Sent() as sent:
        yield sent


def row_on(place: torch.device) -> MicroBatch:
    (row,) = pack(attention_cases.make_groups(), 1000, False, place)
    return row


def loss_of(name: str) -> TokenLoss:
    cls: Any = LOSSES[name]
    return cls(**{knob: KNOBS[knob] for knob in (field.name for field in dataclasses.fields(cls))})


@pytest.mark.parametrize("family", ["llama", "qwen2, window in one layer", "gemma3", "phi3"])
def test_forward_loss_and_backward_of_a_row(family: str, device: Sent) -> None:
    model, row = attention_cases.packed_copy(attention_cases.make_model(family)).to(META), row_on(META)
    device.copies.clear()
    logprobs, entropy = policy_logprobs(model, row, 0.9)
    (Objective(loss_of("dapo"))(logprobs, entropy, row).loss / 3).backward()
    assert len(device.copies) <= 2, "the plan of the attention's calls, and of those with a window"
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_with_every_term(name: str, level: str, device: Sent) -> None:
    row = row_on(META)
    logprobs, entropy = (torch.zeros(len(row.labels), device=META, requires_grad=True) for _ in range(2))
    row = dataclasses.replace(
        row, scores={"ref_logprobs": torch.zeros_like(logprobs)}, step_constants=StepConstants(0.1)
    )
    device.copies.clear()
    output = Objective(loss_of(name), level, **EVERYTHING)(logprobs, entropy, row)
    output.loss.backward()
    Metrics().update(output.sums, output.minima, output.maxima)
    assert device.copies == []


def test_a_row_without_a_token_in_the_loss_is_known_without_asking() -> None:
    nothing = collate(dummy(torch.device("cpu")))
    assert row_on(META).in_loss and not nothing.in_loss
    output = Objective(loss_of("grpo"))(torch.zeros(1), torch.zeros(1), nothing)
    assert output.minima == output.maxima == {}


def test_step_reads_all_losses_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three losses isn't finite. All three are computed, and one transfer reads them."""
    reads: list[int] = []
    monkeypatch.setattr(
        "colograd.training.learner.numbers", lambda losses: reads.append(len(losses)) or numbers(losses)
    )
    (row,) = plan_rows(attention_cases.make_groups(), 1000, False, torch.device("cpu"))
    values = iter((1.0, float("nan"), 2.0))
    step = StepBatch((row,) * 3, 1, 1, {}, (), version=4)
    weight = torch.ones((), requires_grad=True)

    class Alone:
        agree = staticmethod(lambda what: contextlib.nullcontext())
        backward = staticmethod(torch.Tensor.backward)

    with pytest.raises(FloatingPointError, match="The loss of step 5, micro-batch 2 is nan"):
        run = lambda row: LossOutput(weight * next(values), {}, {}, {})  # noqa: E731
        loss_pass(step, run, contextlib.nullcontext, Alone())  # type: ignore[arg-type]
    assert reads == [3] and next(values, None) is None


def test_numbers_come_in_their_order_from_wherever_they_are() -> None:
    assert numbers([1, torch.tensor(2), 3.5, torch.tensor(4.25), torch.tensor([5.0])]) == [1.0, 2.0, 3.5, 4.25, 5.0]
    assert numbers([]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2, window in one layer", "gemma3"])
def test_a_gpu_is_waited_for_nowhere(family: str, checkpointing: bool) -> None:
    """torch's own watch over synchronisations sees none, not even while rows are copied to the device."""
    model = attention_cases.packed_copy(attention_cases.make_model(family), checkpointing).to("cuda", torch.bfloat16)
    objective, where = Objective(loss_of("dapo"), **(EVERYTHING | {"terms": ()})), torch.device("cuda", 0)
    for mode in ("default", "error"):  # the first pass makes what is kept
        torch.cuda.set_sync_debug_mode(mode)
        try:
            row = row_on(where)
            objective(*policy_logprobs(model, row, 0.9), row).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

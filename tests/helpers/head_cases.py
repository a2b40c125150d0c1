"""Values and gradients of a head, by `head_kernels` and in torch.

As a script it runs all cases in Triton's interpreter, and prints their names:

TRITON_INTERPRET=1 python tests/helpers/head_cases.py
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from colograd.policy import head as policy_head

LABELS, VOCABULARY, HIDDEN = 7, 53, 8
TILE, BLOCK = (5, 24), 16  # each last block is short


@dataclass(frozen=True)
class Case:
    """A head, its products, and its labels' distributions."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    wide: bool = False
    bias: bool = False
    entropy: bool = False  # whether the entropy is differentiable
    candidates: bool = False
    part: bool = False  # whether this is one rank's part of the vocabulary


CASES = {
    "plain": Case(),
    "entropy": Case(entropy=True),
    "transforms": Case(temperature=0.7, scale=0.25, softcap=3.0, bias=True, entropy=True),
    "cap without entropy": Case(softcap=2.0),
    "bfloat16": Case(dtype=torch.bfloat16, temperature=1.3),
    "bfloat16, all": Case(0.7, 0.5, 3.0, torch.bfloat16, bias=True, entropy=True, candidates=True),
    "wide": Case(dtype=torch.bfloat16, wide=True, entropy=True),
    "candidates": Case(candidates=True, entropy=True),
    "part": Case(part=True, temperature=0.8, entropy=True),
}


class Candidates:
    """Each label's own token and two thirds of the others, at random."""

    def __init__(self, labels: torch.Tensor, size: int) -> None:
        self.of_all = torch.rand(len(labels), size, generator=torch.Generator().manual_seed(1)).lt(1 / 3)
        self.of_all = self.of_all.to(labels.device).scatter_(1, labels[:, None], False)

    def hidden(self, row: slice, vocabulary: slice) -> torch.Tensor:
        return self.of_all[row, vocabulary]


@dataclass(frozen=True)
class Part:
    """One rank's part of a vocabulary. The other rank has tokens of logit 0 and no labels."""

    start: int = 20
    stop: int = 20 + VOCABULARY
    size: int = 100

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def combine(self, maximum: torch.Tensor, sums: Any) -> Any:
        label_logit, moment, total = sums
        largest = maximum.clamp(min=0.0)
        fall = maximum - largest
        rest = (self.size - VOCABULARY) * (-largest).exp()
        return largest, (label_logit, fall.exp() * (moment + fall * total) - largest * rest, fall.exp() * total + rest)


def results(case: Case, kernels: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Compute log-probabilities, entropies and gradients with a module of kernels, or in torch (None)."""
    generator = torch.Generator().manual_seed(0)
    made = {"hidden": (LABELS, HIDDEN), "weight": (VOCABULARY, HIDDEN), "bias": (VOCABULARY,)}
    given: Any = {name: torch.randn(shape, generator=generator).to(device, case.dtype) for name, shape in made.items()}
    given = {name: value.requires_grad_() for name, value in given.items()}
    labels = torch.tensor([0, 52, 23, 24, 47, 16, 31], device=device)
    head = policy_head.Head(case.temperature, case.scale, case.softcap, case.dtype, case.wide)
    if case.candidates:
        head = replace(head, candidates=Candidates(labels, VOCABULARY))
    if case.part:
        head, labels = replace(head, part=Part()), labels + torch.tensor([0, 0, 5, 20, -20, 100, 0], device=device)
    bias = given["bias"] if case.bias else None
    with contextlib.ExitStack() as replaced:
        for name, value in {"kernels_for": lambda *_: kernels, "tile_shape": lambda *_: TILE}.items():
            replaced.enter_context(mock.patch.object(policy_head, name, value))
        logprob, entropy = policy_head.label_logprobs(
            given["hidden"], given["weight"], bias, labels, head, case.entropy
        )
        of_each = torch.linspace(-1, 1, LABELS, device=device)
        loss = (of_each * logprob).sum() + (entropy.sum() if case.entropy else 0)  # `sum` gives a gradient of stride 0
        loss.backward()
    found = {"logprob": logprob.detach(), "entropy": entropy.detach()}
    return found | {name: value.grad for name, value in given.items() if value.grad is not None}


def check(case: Case, device: str = "cpu") -> None:
    from colograd.policy import head_kernels

    with mock.patch.object(head_kernels, "BLOCK", BLOCK):
        ours, theirs = (results(case, kernels, device) for kernels in (head_kernels, None))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and value.any(), name
        if value.dtype == torch.float32:
            torch.testing.assert_close(
                ours[name], value, rtol=2e-6, atol=2e-6, msg=lambda text, of=name: f"{of}: {text}"
            )
        else:  # The interpreter truncates bfloat16 instead of rounding.
            error = (ours[name] - value).float().norm() / value.float().norm()
            assert error < 2**-7, (name, error)


def main() -> None:
    for name, case in CASES.items():
        print(json.dumps(name))
        check(case)


if __name__ == "__main__":
    sys.exit(main())

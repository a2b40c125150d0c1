"""Proof that the engine reads a policy's parameter where the mapping says it does.

Two things are shown for each parameter. *The right place*: after both sides loaded the same checkpoint, the slice holds
the parameter's value bit for bit. *A place that is read*: when the value changes there, the engine's output changes.
Equality alone proves nothing for norms of ones and biases of zeros, nor for a tensor that the engine has since packed
away into a private layout.

Where several ranks share the engine, the first is shown of each rank's part. The second of one rank's, another one from
parameter to parameter: all take part in each forward and see what it gives, and run the same program.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from ..engine.vllm_engine import Engine
from ..parallel.ranks import together
from .mapping import Slice

PROBE_TOKENS = (8, 64)  # a short prompt first; where it shows nothing, a longer one


def check_equal(slices: Sequence[Slice]) -> None:
    """Check that every slice holds its parameter's value, after both loaded the same checkpoint. A collective.

    Raises:
        RuntimeError: naming the parameters that differ.
    """
    with together("the comparison of the weights"):
        differing = [part.name for part in slices if not part.equal()]
        if differing:
            raise RuntimeError(
                f"{len(differing)} parameters differ between the policy and the engine although both loaded the same "
                f"checkpoint ({', '.join(differing[:3])}): this architecture's weights are laid out in a way that "
                "isn't known yet."
            )


def check_read(slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine) -> list[Slice]:
    """Check that the engine reads every slice on which the policy's output depends. A collective.

    Returns:
        The slices on which neither output depends.

    Raises:
        RuntimeError: the policy's output depends on a parameter, and the engine's doesn't.
    """
    silent = unread(slices, engine)
    with together("the proof of the weights"):
        elsewhere = [part.name for part in silent if not inert(part, policy, engine)]
        if elsewhere:
            raise RuntimeError(
                f"The engine's output doesn't depend on {len(elsewhere)} of {len(slices)} parameters at the place "
                f"where vLLM keeps them ({', '.join(elsewhere[:3])}): it samples from copies of its own, which "
                "publishing can't reach. Leave quantization and custom kernels out of vllm_engine_kwargs; if they are, "
                "this architecture isn't known yet."
            )
    return silent


def unread(slices: Sequence[Slice], engine: Engine) -> list[Slice]:
    """Those of ``slices`` that can be changed without a change of the engine's output.

    One short forward of the engine per slice, with the slice's values negated and then negated back, which restores
    every bit and needs no copy.
    """
    layout, draw = engine.layout, random.Random(0)  # drawn, so that no kind of parameter meets the same rank each time
    silent = [(part, draw.randrange(layout.ranks_per_engine)) for part in slices]
    for length in PROBE_TOKENS:
        ids = probe_ids(engine, length)
        usual = engine.prompt_logprobs(ids)
        noise = float((engine.prompt_logprobs(ids) - usual).abs().max())  # 0 where kernels are deterministic
        candidates, silent = silent, []
        for part, place in candidates:
            with changed(part.destination) if place == layout.engine_place else nullcontext():
                seen = engine.prompt_logprobs(ids)
            if not ((seen - usual).abs() > 2 * noise).any() and bool(seen.isfinite().all()):
                silent.append((part, place))
        if not silent:
            break
    return [part for part, place in silent if place == layout.engine_place]


@torch.no_grad()
def inert(part: Slice, policy: torch.nn.Module, engine: Engine) -> bool:
    """Whether the policy's own output doesn't depend on the parameter either."""
    device = part.source.device
    ids = torch.tensor([probe_ids(engine, PROBE_TOKENS[-1])], device=device)
    was_training = policy.training
    policy.eval()  # a dropout would change the output by itself
    usual = policy(ids).logits
    with changed(part.held):
        same = torch.equal(policy(ids).logits, usual)
    policy.train(was_training)
    return same


def probe_ids(engine: Engine, length: int) -> list[int]:
    """Token ids that differ from each other, as many as the engine's context allows."""
    return [(7919 * (i + 1)) % engine.vocab_size for i in range(min(length, engine.context - 1))]


@contextmanager
def changed(tensor: torch.Tensor) -> Iterator[None]:
    """Another value in ``tensor``'s memory while the context lasts; every bit as before afterwards."""
    with torch.no_grad():
        zeros = tensor.clone() if not tensor.any() else None  # a negated zero changes nothing
        tensor.neg_() if zeros is None else tensor.add_(1)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.neg_() if zeros is None else tensor.copy_(zeros)

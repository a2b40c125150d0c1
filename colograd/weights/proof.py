"""Proof that the engine reads a policy's parameter where the mapping says it does.

*The right place*: after both sides loaded the same checkpoint, the slice holds the parameter's value bit for bit, which
proves nothing for norms of ones, biases of zeros, or a tensor that the engine has since packed away. *A place that is
read*: when the value changes there, the engine's output changes. That is shown by a forward per parameter (`unread`),
of most at once (`read_together`): all are changed such that the changes cancel, and the policy's gradients say how much
the output would differ if the engine hadn't seen one of them. Ranks of one engine take part in each forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..batch import ModelInput
from ..engine.protocol import Engine
from ..parallel.ranks import gather, on_all_ranks
from ..policy.images import hidden_tokens, own_inputs, sees
from ..policy.logprobs import evaluation_mode
from ..policy.lora import is_adapted, unwrap
from ..policy.row_proof import allowed, completion_logprobs
from .mapping import Slice
from .row_order import is_near
from .sign_probe import EMBEDDING, cancelling, plain_name, with_signs

PROBE_TOKENS = (8, 64)  # a short prompt first; where it shows nothing, a longer one
# One parameter's change must do so many times what is left of all together; its gradient says it to a factor of three.
MARGIN = 10.0
# And so many nats, below which a change might be lost in rounding.
VISIBLE, VISIBLE_16_BIT = 1e-3, 1e-2
# Two ways to compute the largest logit may round it apart by so many times the dtype's step at it: 30 has one of 1/8 in
# bfloat16, and a model that was trained says 30 of tokens that were drawn at random.
ROUNDED_LOGIT = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A short prompt, and what the engine says of it as it is."""

    engine: Engine
    ids: list[int] | ModelInput
    usual: torch.Tensor  # [tokens - 1] log-probabilities
    noise: float  # the most by which two forwards of the same weights differ; 0 where kernels are deterministic

    @classmethod
    def of(cls, engine: Engine, length: int, seen: ModelInput | None = None) -> Probe:
        ids = probe_ids(engine, length) if seen is None else seen
        usual = engine.prompt_logprobs(ids)
        return cls(engine, ids, usual, float((engine.prompt_logprobs(ids) - usual).abs().max()))

    def shift(self) -> float:
        """By how much the output differs now, at most; infinite if it isn't finite."""
        shift = (self.engine.prompt_logprobs(self.ids) - self.usual).abs().max()
        return float(shift) if shift.isfinite() else math.inf

    def differs(self) -> bool:
        return self.shift() > 2 * self.noise


def check_equal(slices: Sequence[Slice]) -> None:
    """Check that every slice holds its parameter's value, up to the policy's quantisation. A collective.

    Raises:
        RuntimeError: naming the parameters that differ.
    """
    with on_all_ranks("the comparison of the weights"):
        differing = [part.name for part in slices if not (part.equal() if part.packed is None else is_near(part))]
        if differing:
            raise RuntimeError(
                f"{len(differing)} parameters differ between the policy and the engine although both loaded the same "
                f"checkpoint ({', '.join(differing[:3])}): this architecture's weights are laid out in a way that "
                "isn't known yet."
            )


def check_same(policy: torch.nn.Module, engine: Engine, seen: ModelInput | None = None) -> None:
    """Check that engine and policy, without its adapter, say the same of a prompt, and of tokens behind a prompt with
    images (``seen``), up to the rounding of their dtype. A collective.

    Raises:
        RuntimeError: they differ.
    """
    hidden = hidden_tokens(unwrap(policy).config)
    ids = [token for token in probe_ids(engine, PROBE_TOKENS[-1]) if token not in hidden]
    theirs = engine.prompt_logprobs(ids)
    with on_all_ranks("the comparison of policy and engine"):
        with base_alone(policy), torch.no_grad():
            tokens = torch.tensor([ids], device=policy.device)
            logits = policy(tokens).logits[0, :-1].float()
        ours = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu()
        rounding = max(allowed(engine.dtype), ROUNDED_LOGIT * float(logits.abs().max()) * torch.finfo(engine.dtype).eps)
        _check_differences(ours - theirs, rounding)
    if seen is None:
        return
    if (
        room := engine.context - len(seen) - 1
    ) < 1:  # completions of one token: what sees has computed at least, and is looked at in `check_read`
        engine.prompt_logprobs(seen)
        return
    behind = ids[: min(PROBE_TOKENS[0], room)]
    theirs = engine.prompt_logprobs(seen.followed_by(behind))[-len(behind) :]
    with on_all_ranks("the comparison of policy and engine"):
        with base_alone(policy), torch.no_grad():
            ours = completion_logprobs(policy, seen, behind).cpu()
        _check_differences(ours - theirs, rounding, " behind images")


def _check_differences(found: torch.Tensor, most: float, where: str = "") -> None:
    error = float(found.abs().mean())
    if not error <= most:
        raise RuntimeError(
            f"With the policy's values the engine differs from it by {error:.2g} nats on average{where}, where "
            f"{most:.2g} is rounding: vLLM computes this architecture otherwise, or has its weights in a way that "
            "isn't known yet. Choose another model; or this one without quantisation, if it is quantised."
        )


def check_read(
    slices: Sequence[Slice],
    policy: torch.nn.Module,
    engine: Engine,
    every: Sequence[Slice] = (),
    seen: ModelInput | None = None,
) -> list[Slice]:
    """Check that the engine reads every slice on which the policy's output depends. A collective.

    Args:
        every: those of all of the policy's parameters, if ``slices`` are some of them.
        seen: a prompt with images, on which what text doesn't depend on is looked at again.

    Returns:
        The slices on which neither output depends.

    Raises:
        RuntimeError: the policy's output depends on a parameter, and the engine's doesn't.
    """
    slices = [part for part in slices if not part.again]  # a prompt alone doesn't go through these
    every = [part for part in every if not part.again]
    text, eyes = ([part for part in slices if sees(part.name) == seeing] for seeing in (False, True))
    shown = read_together(text, policy, engine, [part for part in every or slices if not sees(part.name)])
    silent = unread([part for part in text if part.name not in shown], engine)
    silent += eyes if seen is None else unread(eyes, engine, seen)
    with on_all_ranks("the proof of the weights"):
        rest = [part for part in silent if not added_by_the_first(part, engine)]
        elsewhere = [part.name for part in rest if not inert(part, policy, engine, seen)]
        if elsewhere:
            raise RuntimeError(
                f"The engine's output doesn't depend on {len(elsewhere)} of {len(slices)} parameters at the place "
                f"where vLLM keeps them ({', '.join(elsewhere[:3])}): it samples from copies of its own, which "
                "publishing can't reach. Leave quantization and custom kernels out of vllm_engine_kwargs; if they are, "
                "this architecture isn't known yet."
            )
    return silent


def read_together(slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine, every: Sequence[Slice]) -> set[str]:
    """Names of those of ``slices`` that the engine is shown to read in a few forwards, whatever their number.

    ``every`` parameter gets the signs of `cancelling`, no part of which cancels by itself: an engine that reads all but
    some gives another output, and one that reads none its usual output where the embedding alone is changed. A
    parameter is read if its change alone, by the policy's gradient, would do far more than what is left of all.

    None are shown where an architecture is built in another way. A collective: ranks agree on what is shown.
    """
    if not slices:
        return set()
    probe = Probe.of(engine, PROBE_TOKENS[0])
    with on_all_ranks("the gradients for the proof of the weights"):
        effects = effects_on(probe_ids(engine, PROBE_TOKENS[0]), slices, policy)
    visible = VISIBLE if engine.dtype == torch.float32 else VISIBLE_16_BIT
    shown: set[str] = set()
    for norms in (True, False):
        signs = cancelling({plain_name(part): part.source.shape for part in every}, norms)
        embedding = [part for part in every if plain_name(part).split(".")[-2:-1] == [EMBEDDING]]
        if not signs:
            break
        with with_signs(embedding, signs):
            if not probe.differs():
                break
        with with_signs(every, signs):
            left = max(probe.shift(), probe.noise)
        least = max(MARGIN * left, visible)
        clear = {name for name, effect in effects.items() if least < effect < math.inf}
        shown |= {part.name for part in slices if plain_name(part) in signs and part.name in clear}
        if left <= 2 * probe.noise:
            break
    for others in gather(sorted(shown)):
        shown &= {*others}
    return shown


def effects_on(ids: Sequence[int], slices: Sequence[Slice], policy: torch.nn.Module) -> dict[str, float]:
    """By how many nats, about, the prompt's log-probability changes if a random half of a parameter's values (of those
    that this rank's engine has) change their sign: the norm of gradient times value. Empty: there is no memory for it.
    """
    found: dict[str, float] = {}
    given = {parameter: parameter.requires_grad for parameter in policy.parameters()}
    asked = {part.source: part for part in slices if part.source in given}  # a buffer gets no gradient

    def look(parameter: torch.Tensor) -> None:
        part, gradient = asked[parameter], parameter.grad
        assert gradient is not None
        effect = part.part_of(gradient.mul_(parameter.detach()))
        found[part.name] = float(torch.linalg.vector_norm(effect, dtype=torch.float32))
        parameter.grad = None

    hooks: list[Any] = []
    packed = [(part, part.packed.layer) for part in slices if part.packed is not None]
    try:
        for parameter in given:
            parameter.requires_grad_(parameter in asked)
        hooks += [parameter.register_post_accumulate_grad_hook(look) for parameter in asked]
        hooks += [layer.register_forward_hook(partial(_look_behind, part, found)) for part, layer in packed]
        tokens = torch.tensor([ids], device=next(iter(given)).device)
        with base_alone(policy), torch.enable_grad():
            logits = policy(tokens).logits[0, :-1].float()
            said = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).sum()
            if said.requires_grad:  # else it depends on none of them
                said.backward()
    except torch.OutOfMemoryError:
        found = {}
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, requires_grad in given.items():
            parameter.requires_grad_(requires_grad)
            if parameter in asked:
                parameter.grad = None
    return found


@contextmanager
def base_alone(policy: torch.nn.Module) -> Iterator[None]:
    """The policy without dropout and without its adapter, which the engine doesn't have yet."""
    given = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        with evaluation_mode(policy), policy.disable_adapter() if is_adapted(policy) else nullcontext():
            for parameter, requires_grad in given:
                parameter.requires_grad_(requires_grad)  # peft freezes what it disables
            yield
    finally:
        for parameter, requires_grad in given:
            parameter.requires_grad_(requires_grad)


def _look_behind(part: Slice, found: dict[str, float], layer: Any, inputs: Any, output: torch.Tensor) -> None:
    """A forward hook of a quantised layer: its weight's gradient is that of what comes out times what went in."""
    assert part.packed is not None
    packed, seen = part.packed, inputs[0].detach().flatten(0, -2).float()
    if not output.requires_grad:  # nothing before it does
        output.requires_grad_()

    def look(gradient: torch.Tensor) -> None:
        effect = part.part_of((gradient.flatten(0, -2).float().T @ seen).mul_(packed.values()))
        found[part.name] = float(torch.linalg.vector_norm(effect))

    output.register_hook(look)


def unread(slices: Sequence[Slice], engine: Engine, seen: ModelInput | None = None) -> list[Slice]:
    """Those of ``slices`` that can be changed without a change of the engine's output: one short forward per slice and
    rank of the engine."""
    layout = engine.layout
    silent = [(part, place) for part in slices for place in range(layout.ranks_per_engine)]
    for length in PROBE_TOKENS:
        if not silent:
            break
        probe = Probe.of(engine, length, seen)
        candidates, silent = silent, []
        for part, place in candidates:
            with changed(part.destination) if place == layout.engine_place else nullcontext():
                differs = probe.differs()
            if not differs:
                silent.append((part, place))
    return [part for part, place in silent if place == layout.engine_place]


def added_by_the_first(part: Slice, engine: Engine) -> bool:
    """Whether it is the bias of outputs that an engine's ranks add up: the first rank adds it, the others don't."""
    if engine.layout.engine_place == 0 or not part.name.endswith(".bias"):
        return False
    return engine.tensors.is_added_by_first_rank(part.destination)


@torch.no_grad()
def inert(part: Slice, policy: torch.nn.Module, engine: Engine, seen: ModelInput | None = None) -> bool:
    """Whether the policy's own output doesn't depend on the parameter either."""
    more: dict[str, torch.Tensor] = {}
    device = (part.source if part.packed is None else part.packed.layer.weight).device
    ids = torch.tensor([probe_ids(engine, PROBE_TOKENS[-1])], device=device)
    if seen is not None and seen.images is not None and sees(part.name):
        ids = torch.tensor([seen.ids], device=device)
        more = {name: value.to(device) for name, value in own_inputs(seen.images, 0).items()}
    with evaluation_mode(policy):  # a dropout would change the output by itself
        usual = policy(ids, **more).logits
        with changed(part.view) if part.packed is None else _negated(part.packed.layer):
            return torch.equal(policy(ids, **more).logits, usual)


@contextmanager
def _negated(layer: Any) -> Iterator[None]:
    """A quantised layer as with its weight times -1, while the context lasts."""

    def negate(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return -output if layer.bias is None else 2 * layer.bias - output

    hook = layer.register_forward_hook(negate)
    try:
        yield
    finally:
        hook.remove()


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

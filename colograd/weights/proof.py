"""Proof that the engine reads each of the policy's parameters at the place in the mapping.

*It is the right place*: after both sides loaded the same checkpoint, the slice has the parameter's value bit for bit.
This proves nothing for norms of ones, biases of zeros, or a tensor that the engine has packed since. *The engine reads
it*: if the value changes there, the engine's output changes. `unread` shows this with a forward per parameter,
`read_together` for most parameters at once. It changes all parameters so that the changes cancel; the policy's
gradients estimate how much the output would differ if the engine didn't read one parameter. All ranks of an engine
take part in each forward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import ModelInput
from ..engine.protocol import Engine
from ..parallel.ranks import gather, on_all_ranks
from ..policy.logprobs import evaluation_mode
from ..policy.lora import is_adapted, unwrap
from ..policy.row_proof import allowed, completion_logprobs
from ..policy.towers import sees
from .mapping import Slice
from .row_order import is_near
from .sign_probe import EMBEDDING, cancelling, with_signs

PROBE_TOKENS = (8, 64)  # lengths of a short prompt, and of a longer one for parameters without effect on the short one
# Least effect of one parameter's change, as a multiple of the remaining effect of all changes together. The gradient
# estimates an effect up to a factor of three.
MARGIN = 10.0
# Least effect in nats, in float32 and in 16 bits; below, a change might be lost in rounding.
VISIBLE, VISIBLE_16_BIT = 1e-3, 1e-2
# Largest rounding difference between two ways to compute the largest logit, in steps of its dtype. A trained model has
# logits of about 30 for random tokens, and the step of bfloat16 at 30 is 1/8.
ROUNDED_LOGIT = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A short prompt with the engine's output for unchanged weights."""

    engine: Engine
    ids: list[int] | ModelInput
    usual: torch.Tensor  # [tokens - 1] log-probabilities with unchanged weights
    noise: float  # largest difference between two forwards with the same weights; 0 with deterministic kernels

    @classmethod
    def of(cls, engine: Engine, ids: list[int] | ModelInput) -> Probe:
        usual = engine.prompt_logprobs(ids)
        return cls(engine, ids, usual, float((engine.prompt_logprobs(ids) - usual).abs().max()))

    def shift(self) -> float:
        """Return the largest change of a log-probability since the start; infinite if the output isn't finite."""
        shift = (self.engine.prompt_logprobs(self.ids) - self.usual).abs().max()
        return float(shift) if shift.isfinite() else math.inf

    def differs(self) -> bool:
        """Return whether the output has changed by more than noise."""
        return self.shift() > 2 * self.noise


def check_equal(slices: Sequence[Slice]) -> None:
    """Raise a RuntimeError unless every slice has its parameter's value, up to quantisation. A collective."""
    with on_all_ranks("the comparison of the weights"):
        differing = [part.name for part in slices if not (part.equal() if part.packed is None else is_near(part))]
        if differing:
            raise RuntimeError(
                f"{len(differing)} parameters differ between the policy and the engine although both loaded the same "
                f"checkpoint ({', '.join(differing[:3])}): Colograd doesn't know this architecture's layout of weights "
                "in vLLM yet."
            )


def check_same(policy: torch.nn.Module, engine: Engine, tower_prompt: ModelInput | None = None) -> None:
    """Raise a RuntimeError unless engine and policy have the same log-probabilities, up to rounding. A collective.

    They are compared on a prompt of tokens, and on tokens after a prompt with images. The policy runs without its
    adapter.
    """
    # A model may read the placeholders of its towers as padding (Gemma 4), and vLLM reads them as tokens.
    placeholders = {getattr(unwrap(policy).config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}
    ids = [token for token in probe_ids(engine, PROBE_TOKENS[-1]) if token not in placeholders]
    engine_logprobs = engine.prompt_logprobs(ids)
    with on_all_ranks("the comparison of policy and engine"):
        with base_alone(policy), torch.no_grad():
            tokens = torch.tensor([ids], device=policy.device)
            logits = policy(tokens).logits[0, :-1].float()
        policy_logprobs = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu()
        rounding = max(allowed(engine.dtype), ROUNDED_LOGIT * float(logits.abs().max()) * torch.finfo(engine.dtype).eps)
        _check_differences(policy_logprobs - engine_logprobs, rounding)
    if tower_prompt is None:
        return
    room = engine.context - len(tower_prompt) - 1
    if room < 1:  # the context has no room for tokens after the images: only run the tower; `check_read` tests it
        engine.prompt_logprobs(tower_prompt)
        return
    completion = ids[: min(PROBE_TOKENS[0], room)]
    engine_logprobs = engine.prompt_logprobs(tower_prompt.followed_by(completion))[-len(completion) :]
    with on_all_ranks("the comparison of policy and engine"):
        with base_alone(policy), torch.no_grad():
            policy_logprobs = completion_logprobs(policy, tower_prompt, completion).cpu()
        _check_differences(policy_logprobs - engine_logprobs, rounding, " after images")


def _check_differences(differences: torch.Tensor, most: float, where: str = "") -> None:
    """Raise a RuntimeError if log-probabilities differ by more than ``most`` nats on average."""
    error = float(differences.abs().mean())
    if not error <= most:
        raise RuntimeError(
            f"With the policy's weights the engine's log-probabilities differ by {error:.2g} nats on average{where}, "
            f"above the rounding error of {most:.2g}: vLLM computes this architecture differently, or stores its "
            "weights in an unknown layout. Choose another model, or load a quantised one without quantisation."
        )


def check_read(
    slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine, every: Sequence[Slice] = (),
    tower_prompt: ModelInput | None = None,
) -> list[Slice]:  # fmt: skip
    """Check that the engine reads every slice that the policy's output depends on. A collective.

    Args:
        every: the slices of all parameters of the policy; default: ``slices``.
        tower_prompt: a prompt with images, for the parameters of the vision tower.

    Returns:
        The slices that neither output depends on.

    Raises:
        RuntimeError: the policy's output depends on a parameter, but the engine's output doesn't.
    """
    slices = [part for part in slices if not part.again]  # the engine doesn't read these for a prompt
    every = [part for part in every if not part.again]
    text, tower = ([part for part in slices if sees(part.name) == in_tower] for in_tower in (False, True))
    proven = read_together(text, policy, engine, [part for part in every or slices if not sees(part.name)])
    silent = unread([part for part in text if part.name not in proven], engine)
    silent += tower if tower_prompt is None else unread(tower, engine, tower_prompt)
    with on_all_ranks("the proof of the weights"):
        rest = silent
        if engine.layout.engine_place > 0:  # where ranks sum a layer's outputs, only the first one adds the bias
            of_first = engine.tensors.is_added_by_first_rank
            rest = [part for part in silent if not (part.name.endswith(".bias") and of_first(part.destination))]
        unreachable = [part.name for part in rest if not inert(part, policy, engine, tower_prompt)]
        if unreachable:
            raise RuntimeError(
                f"The engine's output doesn't depend on {len(unreachable)} of {len(slices)} parameters at the place "
                f"where vLLM stores them ({', '.join(unreachable[:3])}): it samples with its own copies, which "
                "publishing can't update. Remove quantization and custom kernels from vllm_engine_kwargs. Without "
                "them, Colograd doesn't support this architecture yet."
            )
    return silent


def read_together(slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine, every: Sequence[Slice]) -> set[str]:
    """Return the names of slices that the engine provably reads, from a few forwards for any number of slices.

    Every parameter is multiplied by the signs of `cancelling`, and no part of these changes cancels alone. If the
    engine reads only some parameters, its output changes. If it reads none, a change of only the embedding has no
    effect. A parameter is proven if its change alone, by the policy's gradient, would have a far larger effect than
    all changes together have.

    The result is empty for architectures unlike Llama. A collective: the ranks return the same names.
    """
    if not slices:
        return set()
    probe = Probe.of(engine, probe_ids(engine, PROBE_TOKENS[0]))
    with on_all_ranks("the gradients for the proof of the weights"):
        effects = effects_on(probe_ids(engine, PROBE_TOKENS[0]), slices, policy)
    visible = VISIBLE if engine.dtype == torch.float32 else VISIBLE_16_BIT
    proven: set[str] = set()
    for norms in (True, False):
        signs = cancelling({part.plain_name: part.source.shape for part in every}, norms)
        embedding = [part for part in every if part.plain_name.split(".")[-2:-1] == [EMBEDDING]]
        if not signs:
            break
        with with_signs(embedding, signs):
            if not probe.differs():
                break
        with with_signs(every, signs):
            remainder = max(probe.shift(), probe.noise)
        least = max(MARGIN * remainder, visible)
        clear = {name for name, effect in effects.items() if least < effect < math.inf}
        proven |= {part.name for part in slices if part.plain_name in signs and part.name in clear}
        if remainder <= 2 * probe.noise:
            break
    for names in gather(sorted(proven)):
        proven &= {*names}
    return proven


def effects_on(ids: Sequence[int], slices: Sequence[Slice], policy: torch.nn.Module) -> dict[str, float]:
    """Estimate the effect of slices on the prompt's log-probability, in nats, by name; empty: memory is too small.

    It is the effect of changing the sign of a random half of a slice's values: the norm of gradient times value. Packed
    weights and buffers have no gradient, and aren't in the result.
    """
    effects: dict[str, float] = {}
    parameters = {*policy.parameters()}
    slice_of = {part.source: part for part in slices if part.source in parameters}

    def measure(parameter: torch.Tensor) -> None:
        part, gradient = slice_of[parameter], parameter.grad
        assert gradient is not None
        effect = part.part_of(gradient.mul_(parameter.detach()))
        effects[part.name] = float(torch.linalg.vector_norm(effect, dtype=torch.float32))
        parameter.grad = None

    tokens = torch.tensor([ids], device=next(policy.parameters()).device)
    hooks: list[Any] = []
    try:
        with base_alone(policy, slice_of), torch.enable_grad():
            hooks += [parameter.register_post_accumulate_grad_hook(measure) for parameter in slice_of]
            logits = policy(tokens).logits[0, :-1].float()
            logprob = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).sum()
            if logprob.requires_grad:  # else it depends on none of these parameters
                logprob.backward()
    except torch.OutOfMemoryError:
        return {}
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in slice_of:
            parameter.grad = None
    return effects


@contextmanager
def base_alone(policy: torch.nn.Module, trained: Collection[torch.Tensor] = ()) -> Iterator[None]:
    """Run the policy without dropout and without its adapter, which the engine doesn't have yet.

    Only the parameters of ``trained`` get gradients.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        with evaluation_mode(policy), policy.disable_adapter() if is_adapted(policy) else nullcontext():
            for parameter, _ in flags:
                parameter.requires_grad_(parameter in trained)
            yield
    finally:
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)  # peft freezes the adapter that it disables


def unread(slices: Sequence[Slice], engine: Engine, tower_prompt: ModelInput | None = None) -> list[Slice]:
    """Return the slices that can change without a change of the engine's output.

    This takes one short forward per slice and rank of the engine.
    """
    layout = engine.layout
    silent = [(part, place) for part in slices for place in range(layout.ranks_per_engine)]
    for length in PROBE_TOKENS:
        if not silent:
            break
        probe = Probe.of(engine, probe_ids(engine, length) if tower_prompt is None else tower_prompt)
        candidates, silent = silent, []
        for part, place in candidates:
            with changed(part.destination) if place == layout.engine_place else nullcontext():
                if not probe.differs():
                    silent.append((part, place))
    return [part for part, place in silent if place == layout.engine_place]


@torch.no_grad()
def inert(part: Slice, policy: torch.nn.Module, engine: Engine, tower_prompt: ModelInput | None = None) -> bool:
    """Return whether the policy's output doesn't depend on a parameter either."""
    if part.packed is not None:
        return tower_prompt is None and sees(part.name)
    more: dict[str, torch.Tensor] = {}
    ids = torch.tensor([probe_ids(engine, PROBE_TOKENS[-1])], device=part.source.device)
    if tower_prompt is not None and tower_prompt.images is not None and sees(part.name):
        ids = torch.tensor([tower_prompt.ids], device=ids.device)
        more = {name: value.to(ids.device) for name, value in tower_prompt.images.inputs.items()}
    with evaluation_mode(policy):  # a dropout would change the output by itself
        usual = policy(ids, **more).logits
        with changed(part.view):
            return torch.equal(policy(ids, **more).logits, usual)


def probe_ids(engine: Engine, length: int) -> list[int]:
    """Return ``length`` different token ids, or as many as the engine's context allows."""
    return [(7919 * (i + 1)) % engine.vocab_size for i in range(min(length, engine.context - 1))]


@contextmanager
def changed(tensor: torch.Tensor) -> Iterator[None]:
    """Change the values of a tensor in its memory while the context lasts, and restore every bit afterwards."""
    with torch.no_grad():
        zeros = tensor.clone() if not tensor.any() else None  # negation doesn't change zeros
        tensor.neg_() if zeros is None else tensor.add_(1)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.neg_() if zeros is None else tensor.copy_(zeros)

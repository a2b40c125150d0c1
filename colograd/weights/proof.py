"""Check at start that each policy parameter has the right slice of an engine tensor, and that the engine reads it.

*Equal values*: policy and engine loaded the same checkpoint, so the slice equals the parameter. Equality isn't
enough: many norm weights are all 1, and the engine may read a packed copy instead of the slice.
*Dependence*: if the slice's values change, the engine's output changes. All ranks of an engine take part in each
forward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from ..batch import ModelInput
from ..engine.protocol import Engine
from ..parallel.ranks import gather, on_all_ranks
from ..policy.logprobs import evaluation_mode
from ..policy.lora import is_adapted, unwrap
from ..policy.row_proof import allowed, completion_logprobs
from ..policy.towers import sees
from .mapping import Slice, is_near

PROBE_TOKENS = (8, 64)  # Prompt lengths. Some parameters affect only longer prompts.
# A parameter counts as read if its predicted effect is more than this many times the measured effect of all changes
# that cancel. The gradient predicts an effect up to a factor of three.
MARGIN = 10.0
VISIBLE, VISIBLE_16_BIT = 1e-3, 1e-2  # Rounding in float32 and in 16 bits hides smaller effects (nats).
# Largest rounding difference of the largest logit between policy and engine, in steps of the dtype. A trained model has
# logits of about 30 for random tokens, and the step of bfloat16 at 30 is 1/8.
ROUNDED_LOGIT = 2.0


class Probe:
    """A short prompt, and the engine's log-probabilities of its tokens with unchanged weights."""

    def __init__(self, engine: Engine, ids: list[int] | ModelInput) -> None:
        self.engine, self.ids = engine, ids
        self.usual = engine.prompt_logprobs(ids)
        self.noise = self.shift()  # Largest difference of two forwards with equal weights, in nats.

    def shift(self) -> float:
        """Return the largest change of a log-probability in nats since `__init__`; inf if a value isn't finite."""
        shift = (self.engine.prompt_logprobs(self.ids) - self.usual).abs().max()
        return float(shift) if shift.isfinite() else math.inf

    def differs(self) -> bool:
        return self.shift() > 2 * self.noise


def check_equal(slices: Sequence[Slice]) -> None:
    with on_all_ranks("the comparison of the weights"):
        differing = [part.name for part in slices if not (part.equal() if part.packed is None else is_near(part))]
        if differing:
            raise RuntimeError(
                f"{len(differing)} parameters differ between the policy and the engine although both loaded the same "
                f"checkpoint ({', '.join(differing[:3])}): Colograd doesn't know this architecture's layout of weights "
                "in vLLM yet. Use another model."
            )


def check_same(policy: torch.nn.Module, engine: Engine, tower_prompt: ModelInput | None = None) -> None:
    """Compare log-probabilities of engine and policy, both without a LoRA adapter. A collective.

    A RuntimeError is raised if they differ by more than rounding errors.
    """
    # Leave out placeholders of images, video and audio: Gemma 4 reads them as padding, and vLLM as tokens.
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
    completion = ids[: max(0, min(PROBE_TOKENS[0], engine.context - len(tower_prompt) - 1))]
    if not completion:  # no room for tokens after the images: only run the vision tower
        engine.prompt_logprobs(tower_prompt)
        return
    engine_logprobs = engine.prompt_logprobs(tower_prompt.followed_by(completion))[-len(completion) :]
    with on_all_ranks("the comparison of policy and engine"):
        with base_alone(policy), torch.no_grad():
            policy_logprobs = completion_logprobs(policy, tower_prompt, completion).cpu()
        _check_differences(policy_logprobs - engine_logprobs, rounding, " after images")


def _check_differences(differences: torch.Tensor, most: float, where: str = "") -> None:
    if not (error := float(differences.abs().mean())) <= most:
        raise RuntimeError(
            f"Policy and engine have the same weights, but their log-probabilities differ by {error:.2g} nats on "
            f"average{where}. Rounding explains at most {most:.2g}: vLLM computes this architecture differently, or "
            "stores its weights in an unknown layout. Use another model. If this one is quantised, load it without "
            "quantisation."
        )


def check_read(
    slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine, every: Sequence[Slice] = (),
    tower_prompt: ModelInput | None = None,
) -> list[Slice]:  # fmt: skip
    """Test whether the engine reads each slice. Return the slices without effect on its output. A collective.

    Raise RuntimeError if one of these has an effect on the policy's output. ``every``: all slices of the policy
    (default: ``slices``). Without ``tower_prompt`` (a prompt with images) a vision tower's slices aren't tested, but
    returned.
    """
    # A prompt doesn't read the second copies for decoding (`mapping.ABSORBED`).
    slices = [part for part in slices if not part.again]
    every = [part for part in every if not part.again]
    text, tower = ([part for part in slices if sees(part.name) == in_tower] for in_tower in (False, True))
    # `read_together` and `unread` share one probe, which saves two forwards.
    probe = Probe(engine, probe_ids(engine, PROBE_TOKENS[0])) if text else None
    proven = read_together(text, policy, engine, [part for part in every or slices if not sees(part.name)], probe)
    silent = unread([part for part in text if part.name not in proven], engine, probe=probe)
    silent += tower if tower_prompt is None else unread(tower, engine, tower_prompt)
    with on_all_ranks("the proof of the weights"):
        rest = silent
        if engine.layout.engine_place > 0:  # only the first rank adds the bias of a summed output
            of_first = engine.tensors.is_added_by_first_rank
            rest = [part for part in silent if not (part.name.endswith(".bias") and of_first(part.destination))]
        if unreachable := [part.name for part in rest if not inert(part, policy, engine, tower_prompt)]:
            raise RuntimeError(
                f"The engine's output doesn't depend on {len(unreachable)} of {len(slices)} parameters in vLLM's "
                f"memory ({', '.join(unreachable[:3])}): vLLM computes with repacked copies of them, which no "
                "weight sync can update. Remove quantization and custom kernels from vllm_engine_kwargs. If the error "
                "stays, Colograd doesn't support this architecture yet."
            )
    return silent


def read_together(
    slices: Sequence[Slice], policy: torch.nn.Module, engine: Engine, every: Sequence[Slice], probe: Probe | None = None
) -> set[str]:
    """Return names of slices that the engine certainly reads. Any number of slices takes a few forwards. A collective.

    The engine's weights are multiplied by the signs of `cancelling`, which together leave its output unchanged. If the
    engine ignored one slice, that slice's signs would be missing and the output would change. `effects_on` predicts
    that change. The slice counts as read if the prediction is far larger than the output's measured change.
    """
    if not slices:
        return set()
    probe = probe or Probe(engine, probe_ids(engine, PROBE_TOKENS[0]))
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
    """Estimate, per slice, by how many nats the prompt's log-probability changes if random elements of the slice change
    sign: the norm of value * derivative over the slice's elements. Return {} if the gradients don't fit into memory."""
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
    with ExitStack() as stack:
        try:
            stack.enter_context(base_alone(policy, slice_of))
            stack.enter_context(torch.enable_grad())
            for parameter in slice_of:
                stack.callback(setattr, parameter, "grad", None)
                stack.callback(parameter.register_post_accumulate_grad_hook(measure).remove)
            logits = policy(tokens).logits[0, :-1].float()
            logprob = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).sum()
            if logprob.requires_grad:
                logprob.backward()
        except torch.OutOfMemoryError:
            return {}
    return effects


@contextmanager
def base_alone(policy: torch.nn.Module, trained: Collection[torch.Tensor] = ()) -> Iterator[None]:
    flags = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        with evaluation_mode(policy), policy.disable_adapter() if is_adapted(policy) else nullcontext():
            for parameter, _ in flags:
                parameter.requires_grad_(parameter in trained)
            yield
    finally:
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


def unread(
    slices: Sequence[Slice], engine: Engine, tower_prompt: ModelInput | None = None, probe: Probe | None = None
) -> list[Slice]:
    """Return the slices without effect on the engine's output. A slice costs 1 or 2 forwards per engine rank."""
    layout = engine.layout
    silent = [(part, place) for part in slices for place in range(layout.ranks_per_engine)]
    for length in PROBE_TOKENS:
        if not silent:
            break
        probe = probe or Probe(engine, probe_ids(engine, length) if tower_prompt is None else tower_prompt)
        candidates, silent = silent, []
        for part, place in candidates:
            with changed(part.destination) if place == layout.engine_place else nullcontext():
                if not probe.differs():
                    silent.append((part, place))
        probe = None
    return [part for part, place in silent if place == layout.engine_place]


@torch.no_grad()
def inert(part: Slice, policy: torch.nn.Module, engine: Engine, tower_prompt: ModelInput | None = None) -> bool:
    if part.packed is not None:  # A quantised parameter counts as inert only in a tower without test prompt.
        return tower_prompt is None and sees(part.name)
    more: dict[str, torch.Tensor] = {}
    ids = torch.tensor([probe_ids(engine, PROBE_TOKENS[-1])], device=part.source.device)
    if tower_prompt is not None and tower_prompt.images is not None and sees(part.name):
        ids = torch.tensor([tower_prompt.ids], device=ids.device)
        more = {name: value.to(ids.device) for name, value in tower_prompt.images.inputs.items()}
    with evaluation_mode(policy):  # With dropout the policy's output would change at random.
        usual = policy(ids, **more).logits
        with changed(part.source.detach()[part.cut]):
            return torch.equal(policy(ids, **more).logits, usual)


def probe_ids(engine: Engine, length: int) -> list[int]:
    """Return at most ``length`` token ids for a test prompt, all of them different."""
    return [(7919 * (i + 1)) % engine.vocab_size for i in range(min(length, engine.context - 1))]


@contextmanager
def changed(tensor: torch.Tensor) -> Iterator[None]:
    """Negate a tensor in place while the context lasts (or add 1 if it is all zeros), then restore every bit."""
    with torch.no_grad():
        zeros = tensor.clone() if not tensor.any() else None  # negation leaves zeros unchanged
        tensor.neg_() if zeros is None else tensor.add_(1)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.neg_() if zeros is None else tensor.copy_(zeros)


EMBEDDING, HEAD, LAST_NORM = "embed_tokens", "lm_head", "norm"  # Names of modules in models like Llama.
READERS = {  # Projections that read the residual stream, each with the norm before it.
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "post_attention_layernorm"),
}
WRITERS = {"o_proj": -1.0, "down_proj": 1.0}  # Projections into the residual stream, each with the sign of its input.
NEGATED = ("q_proj", "k_proj", "v_proj", "qkv_proj")
NORMS_OF_HEADS = ("q_norm", "k_norm")

Signs = dict[str, torch.Tensor]  # by parameter name: a tensor of 1 and -1 that expands to the parameter's shape


def cancelling(shapes: Mapping[str, Sequence[int]], norms: bool) -> Signs:
    """Return factors (1 or -1) for a Llama-like decoder's parameters that together leave the output unchanged.

    Some channels of the residual stream change their sign, in the embedding and in all projections that write or read
    the stream. Some channels of each norm change their sign, together with the columns of the projections that read the
    norm. The query and key projections are negated, so the attention scores don't change. The value and output
    projections are negated, so the attention's output doesn't change. A change of sign is exact in every dtype.
    ``norms``: whether norms get factors; false if norms multiply by 1 + weight.
    """
    kinds = {name: name.split(".")[-2] if "." in name else name for name in shapes}
    embedding = next((name for name, kind in kinds.items() if kind == EMBEDDING), None)
    if embedding is None:
        return {}
    width = shapes[embedding][1]
    draw = torch.Generator().manual_seed(0)
    stream, *rows = torch.randint(0, 2, (1 + len(shapes), width), generator=draw) * 2.0 - 1.0
    norm_kinds = {*READERS.values()} | ({LAST_NORM} if HEAD in kinds.values() else set())
    signs: Signs = {
        name: row
        for name, row in zip(shapes, rows, strict=True)
        if norms and kinds[name] in norm_kinds and tuple(shapes[name]) == (width,)
    }
    last_norm = next((name for name in signs if kinds[name] == LAST_NORM), "")
    for name, kind in kinds.items():
        is_bias = name.endswith(".bias")
        if kind == EMBEDDING:
            signs[name] = stream[None]
        elif kind in READERS and is_bias:
            if kind in NEGATED:
                signs[name] = torch.tensor(-1.0)
        elif kind in READERS or (kind == HEAD and not is_bias):
            block = re.match(r".*\.\d+\.", name)
            norm = f"{block.group()}{READERS[kind]}.weight" if block and kind in READERS else last_norm
            columns = stream * signs.get(norm, 1.0)
            signs[name] = (-columns if kind in NEGATED else columns)[None]
        elif kind in WRITERS:
            signs[name] = stream if is_bias else WRITERS[kind] * stream[:, None]
        elif kind in NORMS_OF_HEADS and norms:
            signs[name] = torch.tensor(-1.0)
    return signs


@contextmanager
def with_signs(slices: Sequence[Slice], signs: Signs) -> Iterator[None]:
    @torch.no_grad()
    def multiply() -> None:
        for part in slices:
            if (factors := signs.get(part.plain_name)) is not None:
                part.destination.mul_(part.part_of(factors.to(part.destination).expand(part.source.shape)))

    multiply()
    try:
        yield
    finally:
        multiply()

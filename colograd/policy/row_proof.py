"""Check on a few tokens whether a model computes right log-probabilities on packed rows, or only on padded rows.

An architecture may mix tokens outside transformers' attention interface, ignore the interface's options, or transform
its logits in its own way. So the check compares rows' log-probabilities with those of transformers' own forward.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..batch import FinishReason, Group, MicroBatch, ModelInput, Rollout, ScoredGroup
from ..parallel.ranks import gather, on_all_ranks
from ..riders import Media
from ..runtime import registry
from . import attention
from .head import vocabulary_size
from .layers import NotCompiled, as_it_trains
from .logprobs import evaluation_mode, install, policy_logprobs, steps_of
from .lora import unwrap
from .packing import pack
from .padded import PackedSequence, sequences

PACKABLE = {"full_attention", "sliding_attention"}
# Largest allowed mean difference of log-probabilities, in nats. Rounding causes far less, a wrong context far more.
TOLERANCE, TOLERANCE_16_BIT = {torch.float32: 1e-3}, 0.1


class RowSupport(NamedTuple):
    """An extension's functions for packed rows in layers without attention, listed under "rows" in its `HOOKS`."""

    layer_types: Callable[[Any], frozenset[str]]  # Returns a model's layer types that are supported.
    prepare: Callable[[Any], None]  # Changes the layers so that they take packed rows.


def choose_rows(model: Any, device: torch.device | None = None, why: str = "", asked: Sequence[ModelInput] = ()) -> str:
    """Set the model to packed rows, or to padded rows if log-probabilities on packed rows are wrong.

    Return the reason why rows must be padded, or "". The check runs on ``device``, on made-up tokens and on the prompts
    ``asked``. If a reason is passed as ``why``, only padded rows are checked.
    """
    device, model = device or model.device, unwrap(model)
    own, why = _own_attention(model), expect_rows(model, why)
    with evaluation_mode(model):
        if not why and not (why := _fault(model, own, device, asked, packed=True)):
            return ""
        set_attention(model, own)
        if fault := _fault(model, own, device, asked, packed=False):
            raise ValueError(
                f"{type(model).__name__} can't be trained ({fault}): choose a different model, such as Llama, Qwen, "
                "Gemma or SmolLM."
            )
    return why


def _fault(model: Any, own: str, device: torch.device, asked: Sequence[ModelInput], packed: bool) -> str:
    name, limit = type(model).__name__, allowed(attention.autocast_dtype(device) or model.dtype)
    # A CPU has two methods for packed attention, chosen by the prompts' length. Each threshold forces one method.
    thresholds = (sys.maxsize, 0) if packed and device.type == "cpu" else (attention.IN_PLACE_FROM,)
    try:
        rows = pack(_samples(model, asked), 1000, False, device, share_prompts=packed)
        with attention.watch_windows() as (of_masks, applied):
            to_own = differences(model, rows, 1.0, own, thresholds)[1]
            error = float(to_own.view(len(thresholds), -1).mean(1).max())
    except (NotCompiled, torch.OutOfMemoryError):
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as refusal:
        fault = str(refusal).splitlines()[0]
        return f"{name}: {fault}" if packed else fault
    if not error <= limit:  # A NaN is a failure, too.
        if packed:
            return f"{name}'s packed log-probabilities differ by {error:.2g} nats from the model's on {device}"
        return f"log-probabilities from its hidden states differ by {error:.2g} nats from its own logits"
    if packed and (lost := of_masks - applied):
        return f"{name} doesn't pass the window of {lost.pop()} tokens to its attention"
    return ""


def obstacle(model: Any) -> str:
    """Return the reason in a model's class or configuration why the model can't take packed rows, or ""."""
    config = model.config.get_text_config()
    covered = frozenset[str]().union(*(support.layer_types(model) for support in registry.hooks("rows")))
    if not (covered or getattr(model, "_supports_attention_backend", False)):
        return f"{type(model).__name__} doesn't use transformers' attention interface"
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if other := sorted(set(kinds) - PACKABLE - covered):
        return f"{type(model).__name__} has layers of type {', '.join(other)}"
    return ""


def expect_rows(model: Any, why: str = "") -> str:
    """Set the model to packed or padded rows without a forward. Return the reason why rows must be padded, or ""."""
    model = unwrap(model)
    install_steps(model)
    if why := why or obstacle(model):
        set_attention(model, _own_attention(model))
        return why
    for support in registry.hooks("rows"):
        support.prepare(model)
    set_attention(model, attention.NAME)
    return ""


def install_steps(model: Any) -> None:
    for make in registry.hooks("forward"):
        if (step := make(model)) is not None:
            install(model, step)


def set_attention(model: Any, name: str) -> None:
    """Set the attention implementation. A `ForwardStep` may set a different one for a submodel, e.g. a vision tower."""
    answers = (step.attention(model, name) for step in steps_of(model))
    model.set_attn_implementation(next((answer for answer in answers if answer != name), name))


def choose_rows_where_it_trains(
    model: Any, device: torch.device, others: Sequence[Any] = (), asked: Sequence[ModelInput] = ()
) -> str:
    """Run `choose_rows` on all ranks (a collective). If one rank must pad rows, all ranks pad.

    The models ``others`` get the attention implementation of ``model``.
    """
    with on_all_ranks("the proof of the rows"):
        found = choose_rows(model, device, asked=asked)
    why = next(filter(None, gather(found)), "")
    if why:
        with on_all_ranks("the proof of the rows"):  # A collective, so ranks that already pad rows enter it, too.
            if not found:
                choose_rows(model, device, why, asked)
    for other in others:
        set_attention(unwrap(other), unwrap(model).config._attn_implementation)
    return why


def _own_attention(model: Any) -> str:
    """Return the name of the attention implementation for rows that aren't packed, e.g. "sdpa"."""
    config, current = model.config.get_text_config(), model.config._attn_implementation
    if getattr(config, "attn_logit_softcapping", None):
        return "eager"  # transformers' `sdpa` ignores soft caps of scores.
    usual = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    return usual if current in (None, attention.NAME) else str(current)


def _samples(model: Any, given: Sequence[ModelInput] = ()) -> list[ScoredGroup]:
    vocabulary, first = vocabulary_size(model), itertools.count(11, 101)

    def tokens(length: int) -> array[int]:
        start = next(first)
        return array("i", ((start + 37 * t) % vocabulary for t in range(length)))

    groups: list[ScoredGroup] = []
    for prompt in (ModelInput(tuple(tokens(5))), ModelInput(tuple(tokens(3))), *given):
        rollouts = [_written(prompt, tokens(4)), _written(prompt, tokens(3))]
        if prompt.media is not None:  # This completion stands for a tool's answer with images.
            rollouts.append(_written(prompt, array("i", prompt.ids), (prompt.media,)))
        group = Group({}, tuple(rollouts), len(groups))
        groups.append(ScoredGroup(group, torch.zeros(len(rollouts), 1), torch.ones(len(rollouts))))
    return groups


def _written(asked: ModelInput, ids: array[int], riders: tuple[Media, ...] = ()) -> Rollout:
    everything = torch.ones(len(ids), dtype=torch.bool)
    return Rollout(asked, ids, torch.zeros(len(ids)), everything, FinishReason.STOP, 0, riders=riders)


def _own_logprobs(model: Any, part: PackedSequence, temperature: float) -> torch.Tensor:
    """Compute a completion's log-probabilities (C,) by transformers' own forward of this sequence, without padding."""
    ids = torch.cat([part.prompt_ids, part.completion_ids])[None]
    more = {name: value.to(ids.device) for step in steps_of(model) for name, value in step.own_inputs(part).items()}
    logits = model(input_ids=ids, **more).logits[0, len(part.prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, part.completion_ids[:, None]).squeeze(1)


@torch.no_grad()
def differences(
    model: Any, rows: Sequence[MicroBatch], temperature: float, own: str | None = None, thresholds: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the trainer's log-probabilities with the sampler's, and with those of transformers' own forward.

    Return a tensor of absolute differences, in nats, for each of the two comparisons. transformers' forward uses the
    attention implementation ``own``. ``thresholds``: arguments of `attention.keys_in_place_from`. The trainer's
    forward runs once with each threshold.
    """
    trained, to_sampler, to_own = [], [], []
    with evaluation_mode(model):
        with as_it_trains(model):
            for tokens in thresholds or (attention.IN_PLACE_FROM,):
                with attention.keys_in_place_from(tokens):
                    trained.append([policy_logprobs(model, row, temperature)[0].detach() for row in rows])
        with _with_attention(model, own):
            for row, *of_row in zip(rows, *trained, strict=True):
                logprobs = torch.stack(of_row)
                to_sampler.append(logprobs - row.sampler_logprobs)
                for part in sequences(row):
                    if not any(step.misreads(model, part) for step in steps_of(model)):
                        to_own.append(logprobs[:, part.place] - _own_logprobs(model, part, temperature))
    own_parts = to_own or [to_sampler[0][:, :0]]
    return torch.cat(to_sampler, 1).abs().flatten(), torch.cat(own_parts, 1).abs().flatten()


def allowed(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE_16_BIT)


def completion_logprobs(model: Any, asked: ModelInput, ids: Sequence[int]) -> torch.Tensor:
    """Compute the log-probabilities (C,) of the tokens ``ids`` after the prompt ``asked``.

    The row is padded, because packed rows may not have been checked yet.
    """
    rollout = _written(asked, array("i", ids))
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.ones(1))
    (row,) = pack([group], 1, False, model.device, share_prompts=False)
    with _with_attention(unwrap(model)):
        return policy_logprobs(model, row, 1.0)[0].detach()


@torch.no_grad()
def own_sample_logprobs(model: Any, device: torch.device) -> torch.Tensor:
    """Compute the log-probabilities (N,) of made-up tokens by transformers' own forward."""
    with _with_attention(model):
        parts = [part for row in pack(_samples(model), 1000, False, device) for part in sequences(row)]
        return torch.cat([_own_logprobs(model, part, 1.0) for part in parts])


@contextmanager
def _with_attention(model: Any, name: str | None = None) -> Iterator[None]:
    chosen = model.config._attn_implementation
    try:
        set_attention(model, name or _own_attention(model))
        yield
    finally:
        set_attention(model, chosen)

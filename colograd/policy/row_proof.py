"""Prove on a few tokens whether a model can take packed rows, or only padded ones.

An architecture may mix tokens outside the attention interface, ignore the interface's options (windows, biases), or
change its logits in an unknown way. A comparison with its own logits of each sequence shows this.
"""

from __future__ import annotations

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
from .packing import PackedSequence, pack, sequences

PACKABLE = {"full_attention", "sliding_attention"}
# Largest mean difference of log-probabilities in nats: far above rounding errors, far below the effect of another
# context.
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_16_BIT = 0.1


class RowSupport(NamedTuple):
    """Packed rows for layers that mix tokens without attention. An extension offers it at the seam "rows"."""

    layer_types: Callable[[Any], frozenset[str]]  # types of a model's layers that it covers; empty: none
    prepare: Callable[[Any], None]  # lets the model's layers take packed rows


def choose_rows(model: Any, device: torch.device | None = None, why: str = "", asked: Sequence[ModelInput] = ()) -> str:
    """Set the model's attention for packed rows if it computes them rightly, or else its own for padded rows.

    The proof runs the device's real kernels, with autocast and compilation if they are on.

    Args:
        device: device that computes; default: the model's.
        why: reason to pad rows without a proof of packed ones; empty: no reason.
        asked: prompts with images, for the proof in addition to made-up ones.

    Returns:
        Reason why rows are padded; empty if they are packed.

    Raises:
        ValueError: padded rows don't give the model's own probabilities either.
    """
    device, model = device or model.device, unwrap(model)
    own, name = _own_attention(model), type(model).__name__
    why = expect_rows(model, why)
    with evaluation_mode(model):
        if not why:
            try:
                with attention.watch_windows() as (of_masks, applied):
                    error = _difference(model, own, device, asked, share_prompts=True)
                if error:
                    why = f"{name}'s packed log-probabilities differ by {error:.2g} nats from its own on {device}"
                elif lost := of_masks - applied:
                    why = f"{name} doesn't tell its attention of the window of {lost.pop()} tokens"
                else:
                    return ""
            except (NotCompiled, torch.OutOfMemoryError):
                raise
            except (TypeError, ValueError, RuntimeError) as refusal:
                why = f"{name}: {str(refusal).splitlines()[0]}"
            set_attention(model, own)
        try:
            error = _difference(model, own, device, asked, share_prompts=False)
            said = f"log-probabilities from its hidden states differ by {error:.2g} nats from its own logits"
            fault = said if error else ""
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, TypeError, ValueError, RuntimeError) as refusal:
            fault = str(refusal).splitlines()[0]
    if fault:
        raise ValueError(
            f"{name} can't be trained ({fault}): choose another architecture, such as Llama, Qwen, Gemma or SmolLM."
        )
    return why


def obstacle(model: Any) -> str:
    """Return why the architecture can't take packed rows, from its configuration alone; empty: it may."""
    config = model.config.get_text_config()
    covered = frozenset[str]().union(*(support.layer_types(model) for support in registry.hooks("rows")))
    if not (covered or getattr(model, "_supports_attention_backend", False)):
        return f"{type(model).__name__} doesn't use transformers' attention interface"
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if other := sorted(set(kinds) - PACKABLE - covered):
        return f"{type(model).__name__} has layers of type {', '.join(other)}"
    return ""


def expect_rows(model: Any, why: str = "") -> str:
    """Set the model's attention for the rows that its configuration suggests: padded ones if there is a reason ``why``.

    `choose_rows` proves them later, on the device that trains. Returns the reason to pad rows; empty: they are packed.
    """
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
    """Install the forward's steps that a model's architecture needs: offers (model -> step, or None) at "forward"."""
    for make in registry.hooks("forward"):
        if (step := make(model)) is not None:
            install(model, step)


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the model, and of its parts as its steps say."""
    answers = (step.attention(model, name) for step in steps_of(model))
    model.set_attn_implementation(next((answer for answer in answers if answer != name), name))


def choose_rows_where_it_trains(
    model: Any, device: torch.device, others: Sequence[Any] = (), asked: Sequence[ModelInput] = ()
) -> str:
    """Run `choose_rows` for a model on its device, with one result for all ranks and ``others``. A collective."""
    with on_all_ranks("the proof of the rows"):
        found = choose_rows(model, device, asked=asked)
    why = next(filter(None, gather(found)), "")
    if why and not found:
        with on_all_ranks("the proof of the rows"):
            choose_rows(model, device, why, asked)
    for other in others:
        set_attention(unwrap(other), unwrap(model).config._attn_implementation)
    return why


def _own_attention(model: Any) -> str:
    """Return the attention implementation for rows of one sequence each."""
    config, current = model.config.get_text_config(), model.config._attn_implementation
    if getattr(config, "attn_logit_softcapping", None):
        return "eager"  # transformers' `sdpa` leaves the soft cap out
    if current not in (None, attention.NAME):
        return str(current)
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _samples(model: Any, given: Sequence[ModelInput] = ()) -> list[ScoredGroup]:
    """Make two groups of two completions from tokens that any vocabulary has, and one group per given prompt.

    A third completion repeats a given prompt with its images.
    """
    vocabulary = vocabulary_size(model)
    groups: list[ScoredGroup] = []
    token = 11
    for lengths in ((5, 4, 3), (3, 2, 5), *((1, 4, 3) for _ in given)):
        prompt, *completions = (
            array("i", ((token + 101 * place + 37 * t) % vocabulary for t in range(length)))
            for place, length in enumerate(lengths)
        )
        token += 101 * len(lengths)
        asked = ModelInput(tuple(prompt)) if len(groups) < 2 else given[len(groups) - 2]
        rollouts = [_written(asked, ids) for ids in completions]
        if asked.media is not None:  # like images in a tool's answer
            rollouts.append(_written(asked, array("i", asked.ids), (asked.media,)))
        group = Group({}, tuple(rollouts), len(groups))
        groups.append(ScoredGroup(group, torch.zeros(len(rollouts), 1), torch.ones(len(rollouts))))
    return groups


def _written(asked: ModelInput, ids: array[int], riders: tuple[Media, ...] = ()) -> Rollout:
    everything = torch.ones(len(ids), dtype=torch.bool)
    return Rollout(asked, ids, torch.zeros(len(ids)), everything, FinishReason.STOP, 0, riders=riders)


def _own_logprobs(model: Any, part: PackedSequence, temperature: float) -> torch.Tensor:
    """Compute a completion's log-probabilities [C] from the model's own logits, without packing or padding."""
    ids = torch.cat([part.prompt_ids, part.completion_ids])[None]
    more = {name: value.to(ids.device) for step in steps_of(model) for name, value in step.own_inputs(part).items()}
    logits = model(input_ids=ids, **more).logits[0, len(part.prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, part.completion_ids[:, None]).squeeze(1)


@torch.no_grad()
def differences(
    model: Any, rows: Sequence[MicroBatch], temperature: float, own: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return absolute differences of the trainer's log-probabilities to the sampler's and to the model's own.

    Both are (N,) float32 in nats. The model's own are computed one sequence at a time with ``own`` attention (default:
    transformers' usual one). They lack completions that the model itself would misread (`ForwardStep.misreads`).
    """
    to_sampler, to_own = [], []
    with evaluation_mode(model):
        with as_it_trains(model):
            trained = [policy_logprobs(model, row, temperature)[0].detach() for row in rows]
        with _with_attention(model, own):
            for row, logprobs in zip(rows, trained, strict=True):
                to_sampler.append(logprobs - row.sampler_logprobs)
                for part in sequences(row):
                    if not any(step.misreads(model, part) for step in steps_of(model)):
                        to_own.append(logprobs[part.place] - _own_logprobs(model, part, temperature))
    return torch.cat(to_sampler).abs(), torch.cat(to_own or [to_sampler[0][:0]]).abs()


def _difference(model: Any, own: str, device: torch.device, asked: Sequence[ModelInput], share_prompts: bool) -> float:
    """Return the samples' mean absolute difference from the model's own in nats; 0 if it is within tolerance."""
    rows = pack(_samples(model, asked), 1000, False, device, share_prompts=share_prompts)
    limit = allowed(attention.autocast_dtype(device) or model.dtype)
    # On a CPU these two thresholds together run each of its attention paths on any row.
    both = share_prompts and device.type == "cpu"
    for tokens in (sys.maxsize, 0) if both else (attention.IN_PLACE_FROM,):
        with attention.keys_in_place_from(tokens):
            error = float(differences(model, rows, 1.0, own)[1].mean())
        if not error <= limit:
            return error
    return 0.0


def allowed(dtype: torch.dtype) -> float:
    """Return the largest allowed mean difference in nats between two computations of log-probabilities."""
    return TOLERANCE.get(dtype, TOLERANCE_16_BIT)


def completion_logprobs(model: Any, asked: ModelInput, ids: Sequence[int]) -> torch.Tensor:
    """Compute the log-probabilities [C] float32 of tokens after a prompt, in a padded row.

    Packed rows may not be proved yet.
    """
    rollout = _written(asked, array("i", ids))
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.ones(1))
    (row,) = pack([group], 1, False, model.device, share_prompts=False)
    with _with_attention(unwrap(model)):
        return policy_logprobs(model, row, 1.0)[0].detach()


@torch.no_grad()
def own_sample_logprobs(model: Any, device: torch.device) -> torch.Tensor:
    """Compute log-probabilities (N,) of tokens that any vocabulary has, from the model's own logits."""
    with _with_attention(model):
        parts = [part for row in pack(_samples(model), 1000, False, device) for part in sequences(row)]
        return torch.cat([_own_logprobs(model, part, 1.0) for part in parts])


@contextmanager
def _with_attention(model: Any, name: str | None = None) -> Iterator[None]:
    """Set the model's attention while the context lasts, by default to transformers' usual one."""
    chosen = model.config._attn_implementation
    try:
        set_attention(model, name or _own_attention(model))
        yield
    finally:
        set_attention(model, chosen)

"""Layers that carry a state along a sequence (Gated DeltaNet, Mamba-2, short convolutions) over a `SegmentLayout`: the
state at a prompt's end begins each of its completions, and gradients go through it into the prompt.

The mixing is transformers' own code, with its kernels: it goes on from a cache, which here is of tensors that nothing
changes in place. A prompt runs by itself; completions run together, behind their prompts' states, padded to the right.
Where ranks share out a row's tokens, a rank mixes all of them for a part of the heads: `recurrent_heads`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from ..batch import SegmentLayout
from . import recurrent_heads
from .layers import decoder_layers
from .sending import to_device_async

# Names of the argument with a mixer's state: the first one since transformers 5.24.
CACHES = ("cache", "cache_params", "past_key_values")
SHORTEST = 0.75  # of a batch's longest run: at most a quarter of its tokens are padding


def make_segmented(model: torch.nn.Module) -> None:
    """Have the model's layers with a state take packed rows; other calls of them run as ever."""
    for layer in decoder_layers(model):
        if (mixers := [*mixers_of(layer)]) and not any("forward" in mixer.__dict__ for mixer in mixers):
            for mixer in mixers:
                kind: Any = type(mixer)
                mixer.layout = mixer.row_part = None
                # A bound method: a copy of the mixer gets one that is bound to it.
                mixer.forward = MethodType(functools.partial(_forward, kind.forward, _cache_name(kind)), mixer)
            layer.register_forward_pre_hook(functools.partial(_hand_out, mixers), with_kwargs=True)


def keep_uncompiled(model: torch.nn.Module) -> None:
    """Before its layers are compiled: traced, each layout would make another graph, and a long one."""
    for mixer in mixers_of(model):
        mixer.forward = MethodType(torch.compiler.disable(mixer.forward.__func__), mixer)


def mixers_of(module: torch.nn.Module) -> Iterator[Any]:
    """The modules below it that mix tokens by a causal convolution, and mostly a state, and by no attention."""
    for part in module.modules():
        kind: Any = type(part)
        if any(isinstance(child, torch.nn.Conv1d) for child in part.children()) and _cache_name(kind):
            yield part


@functools.cache
def _cache_name(kind: Any) -> str:
    """Empty: it takes no cache, or is an attention."""
    names = inspect.signature(kind.forward).parameters
    return "" if "position_embeddings" in names else next((name for name in CACHES if name in names), "")


def _hand_out(mixers: list[Any], layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a layer, also where a checkpoint computes it again: its mixers are told the row's layout, and which part
    of the row's tokens this rank has."""
    for mixer in mixers:
        mixer.layout, mixer.row_part = kwargs.get("layout"), kwargs.get("row_part")


def _forward(own: Any, cache: str, mixer: Any, /, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Since transformers 5.23 a checkpoint computes a layer again without `_hand_out`, but its kwargs come down here.
    layout, row_part = kwargs.pop("layout", mixer.layout), kwargs.pop("row_part", mixer.row_part)
    if layout is None:
        return own(mixer, hidden_states, *args, **kwargs)
    run = functools.partial(_over_segments, own, cache, layout)
    if row_part is not None:
        return recurrent_heads.mix(mixer, hidden_states, row_part, run)
    return run(mixer, hidden_states)


def _over_segments(own: Any, cache: str, layout: SegmentLayout, mixer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """A mixer's own forward of the row's tokens, (1, T, C)."""
    plan = _plan(layout, inputs.device)
    states: dict[int, _States] = {}
    outputs = []
    for batch in plan.batches:
        tokens = inputs[0].index_select(0, batch.tokens).unflatten(0, (len(batch.segments), -1))
        carried = _States.of([states[p] for p in batch.parents])
        outputs.append(own(mixer, tokens, **{cache: carried}).flatten(0, 1))
        if batch.is_parent:
            states[batch.segments[0]] = carried
    return torch.cat(outputs).index_select(0, plan.places)[None]


class _States:
    """What a layer keeps of sequences, [B] in each tensor, in the form that mixers know from transformers' caches."""

    record_past = True  # else a mixer would change the convolution's inputs in place

    def __init__(self) -> None:
        self.conv_states: dict[int, torch.Tensor] = {}  # (B, channels, K) the convolution's last inputs
        self.recurrent_states: dict[int, torch.Tensor] = {}
        self.continues = False

    @classmethod
    def of(cls, parents: list[_States]) -> _States:
        """Those of sequences that go on from ``parents``, one each; empty: they begin."""
        found = cls()
        found.continues = bool(parents)
        for name in ("conv_states", "recurrent_states") if parents else ():
            kept = [getattr(parent, name) for parent in parents]
            setattr(found, name, {index: torch.cat([states[index] for states in kept]) for index in kept[0]})
        return found

    @property
    def layers(self) -> _States:
        return self

    def __getitem__(self, layer: int) -> _States:
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.continues

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv_states[state_idx] if self.continues else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent_states[state_idx] if self.continues else None

    def update_conv_state(
        self, inputs: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """All inputs (B, channels, at least K) of the convolution."""
        kernel = conv_kernel_size or inputs.shape[-1]
        if self.continues:
            inputs = torch.cat([self.conv_states[state_idx], inputs], dim=-1)
        inputs = F.pad(inputs, (max(kernel - inputs.shape[-1], 0), 0))
        self.conv_states[state_idx] = inputs[..., -kernel:]
        return inputs

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        self.recurrent_states[state_idx] = states
        return states


@dataclass(frozen=True, slots=True)
class _Run:
    """Segments one after the other through a mixer, from the state of another run's end."""

    segments: tuple[int, ...]  # the last one's outputs are wanted
    parent: int  # the segment whose state they go on from; -1: none


@dataclass(frozen=True, slots=True)
class _Batch:
    """Runs that go through a mixer together; one by itself if others go on from it, whose state must be of its end."""

    segments: tuple[int, ...]
    parents: tuple[int, ...]  # a segment each, or none at all
    is_parent: bool
    tokens: torch.Tensor  # (B * L,) where in the row each token lies; for padding, any


class _Plan:
    """The batches of a layout, parents before their children, and where in their outputs each token's lies."""

    def __init__(self, layout: SegmentLayout, device: torch.device) -> None:
        self.layout, self.starts = layout, layout.starts
        runs = [self._run_of(segment) for segment in range(len(layout.lengths))]
        parents = {run.parent for run in runs} - {-1}
        batches = [[runs[segment]] for segment in sorted(parents)]
        ends = (run for segment, run in enumerate(runs) if segment not in parents)
        for run in sorted(ends, key=lambda run: (run.parent < 0, -self._length(run))):
            longest = batches[-1][0] if batches else run
            alike = (run.parent < 0) == (longest.parent < 0) and longest.segments[-1] not in parents
            if batches and alike and self._length(run) >= SHORTEST * self._length(longest):
                batches[-1].append(run)
            else:
                batches.append([run])
        self.batches, first = [], 0
        places = torch.empty(layout.num_tokens, dtype=torch.int64)
        for batch in batches:
            length, tokens = max(2, *map(self._length, batch)), []  # of one token mixers change their state in place
            if batch[0].parent < 0:
                length = max(map(self._length, batch))
            for run in batch:
                own, last = [self._tokens(segment) for segment in run.segments], run.segments[-1]
                tokens.append(F.pad(torch.cat(own), (0, length - self._length(run))))
                behind = first + self._length(run) - layout.lengths[last]
                places[own[-1]] = behind + torch.arange(layout.lengths[last])
                first += length
            begun = tuple(run.parent for run in batch if run.parent >= 0)
            ends_of = tuple(run.segments[-1] for run in batch)
            at = to_device_async(torch.cat(tokens), device)
            self.batches.append(_Batch(ends_of, begun, ends_of[0] in parents, at))
        self.places = to_device_async(places, device)

    def _run_of(self, segment: int) -> _Run:
        seen = self.layout.attends_to[segment]
        for at, earlier in enumerate(seen):
            assert self.layout.attends_to[earlier] == seen[:at], f"segment {segment} goes on from several ones"
        # What goes on from a single token that goes on itself repeats it: the kernels of one token have no gradient.
        kept = len(seen)
        while kept > 1 and self.layout.lengths[seen[kept - 1]] == 1:
            kept -= 1
        return _Run((*seen[kept:], segment), seen[kept - 1] if kept else -1)

    def _length(self, run: _Run) -> int:
        return sum(self.layout.lengths[s] for s in run.segments)

    def _tokens(self, segment: int) -> torch.Tensor:
        return self.starts[segment] + torch.arange(self.layout.lengths[segment])


_plan = functools.lru_cache(maxsize=16)(_Plan)

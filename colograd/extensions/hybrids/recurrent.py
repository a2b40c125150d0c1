"""Layers that carry a state along a sequence (Gated DeltaNet, Mamba-2, short convolutions) over a `SegmentLayout`.

Each completion starts from the state at its prompt's end, and gradients flow through this state into the prompt.

The layers run transformers' own code and kernels. A layer continues from a cache, whose tensors are never changed in
place. A prompt runs alone. Completions run together from their prompts' states, padded on the right. If ranks divide a
row's tokens, each rank computes all tokens for a part of the heads (`row_part.mix`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...batch import SegmentLayout
from ...policy.layers import decoder_layers
from ...policy.row_proof import RowSupport
from ...policy.sending import to_device_async
from ...policy.supported import ModelFeature
from ...runtime import registry

# Possible names of a mixer's cache argument; the first one since transformers 5.24.
CACHES = ("cache", "cache_params", "past_key_values")
WITH_A_STATE = frozenset({"attention", "conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"})
SHORTEST = 0.75  # minimum length of a run as a fraction of its batch's longest: at most a quarter is padding


class Hybrids(ModelFeature):
    def why_rows_stay_whole(self, model: Any) -> str:
        shares_out = registry.hooks("shares_out_mixer")  # functions of a mixer
        stay = {type(mixer).__name__ for mixer in mixers_of(model) if not any(can(mixer) for can in shares_out)}
        reason = f"has layers of {', '.join(sorted(stay))}, whose state goes from token to token"
        return f"{type(model).__name__} {reason}" if stay else ""


def make_segmented(model: torch.nn.Module) -> None:
    """Let the model's layers with a state take packed rows; other calls of these layers don't change."""
    for layer in decoder_layers(model):
        if (mixers := [*mixers_of(layer)]) and not any("forward" in mixer.__dict__ for mixer in mixers):
            for mixer in mixers:
                kind: Any = type(mixer)
                mixer.layout = mixer.row_part = None
                # A bound method: a copy of the mixer gets one that is bound to it.
                mixer.forward = MethodType(functools.partial(_forward, kind.forward, _cache_name(kind)), mixer)
            layer.register_forward_pre_hook(functools.partial(_hand_out, mixers), with_kwargs=True)


def keep_uncompiled(model: torch.nn.Module) -> None:
    """Exclude the mixers from compilation: each layout would make another long graph. Call before compiling layers."""
    for mixer in mixers_of(model):
        mixer.forward = MethodType(torch.compiler.disable(mixer.forward.__func__), mixer)


def mixers_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the submodules that mix tokens by a causal convolution and usually a state, without attention."""
    for part in module.modules():
        kind: Any = type(part)
        if any(isinstance(child, torch.nn.Conv1d) for child in part.children()) and _cache_name(kind):
            yield part


@functools.cache
def _cache_name(kind: Any) -> str:
    """Return the name of a mixer's cache argument; empty: it takes no cache, or is an attention."""
    names = inspect.signature(kind.forward).parameters
    return "" if "position_embeddings" in names else next((name for name in CACHES if name in names), "")


def _hand_out(mixers: list[Any], layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Pass the row's layout and this rank's part to a layer's mixers, also when a checkpoint recomputes the layer."""
    for mixer in mixers:
        mixer.layout, mixer.row_part = kwargs.get("layout"), kwargs.get("row_part")


def _forward(own: Any, cache: str, mixer: Any, /, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Since transformers 5.23 a checkpoint recomputes a layer without `_hand_out`, but passes the kwargs down to here.
    layout, row_part = kwargs.pop("layout", mixer.layout), kwargs.pop("row_part", mixer.row_part)
    if layout is None:
        return own(mixer, hidden_states, *args, **kwargs)

    def run(mixer: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Run the mixer's own forward over all tokens of the row, (1, T, C)."""
        plan, states, outputs = _plan(layout, inputs.device), dict[int, _States](), []
        for batch in plan.batches:
            tokens = inputs[0].index_select(0, batch.tokens).unflatten(0, (len(batch.segments), -1))
            carried = _States([states[parent] for parent in batch.parents])
            outputs.append(own(mixer, tokens, **{cache: carried}).flatten(0, 1))
            if batch.is_parent:
                states[batch.segments[0]] = carried
        return torch.cat(outputs).index_select(0, plan.places)[None]

    return run(mixer, hidden_states) if row_part is None else row_part.mix(mixer, hidden_states, run)


class _States:
    """States of a layer for B sequences, with the interface of transformers' caches."""

    record_past = True  # if False, a mixer would change the convolution's inputs in place

    def __init__(self, parents: list[_States]) -> None:
        """Make the states of sequences that continue from ``parents``, one each; empty: sequences at their start."""
        self.continues = bool(parents)
        self.conv_states: dict[int, torch.Tensor] = {}  # (B, channels, K), last inputs of the convolution
        self.recurrent_states: dict[int, torch.Tensor] = {}
        for name in ("conv_states", "recurrent_states") if parents else ():
            kept = [getattr(parent, name) for parent in parents]
            setattr(self, name, {index: torch.cat([states[index] for states in kept]) for index in kept[0]})

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
        """Save the convolution's last inputs, and return all of its inputs (B, channels, at least K)."""
        kernel = conv_kernel_size or inputs.shape[-1]
        if self.continues:
            inputs = torch.cat([self.conv_states[state_idx], inputs], dim=-1)
        inputs = F.pad(inputs, (max(kernel - inputs.shape[-1], 0), 0))
        self.conv_states[state_idx] = inputs[..., -kernel:]
        return inputs

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        self.recurrent_states[state_idx] = states
        return states


class _Run(NamedTuple):
    """Segments that go through a mixer one after the other, from the state at another run's end."""

    segments: tuple[int, ...]  # indices of the segments; only the last one's outputs are used
    parent: int  # segment with the starting state; -1: no state
    length: int  # tokens


class _Batch(NamedTuple):
    """Runs that go through a mixer together. A run with children is alone: padding would change its end state."""

    segments: tuple[int, ...]  # last segment of each run
    parents: tuple[int, ...]  # parent segment of each run; empty: no run has one
    is_parent: bool  # whether other runs continue from this one
    tokens: torch.Tensor  # (B * L,) index of each token in the row; arbitrary for padding


class _Plan:
    """Batches of a layout, parents before their children, and the place of each token in the batches' outputs."""

    def __init__(self, layout: SegmentLayout, device: torch.device) -> None:
        lengths, runs = layout.lengths, list[_Run]()
        for segment, seen in enumerate(layout.attends_to):
            for at, earlier in enumerate(seen):
                assert layout.attends_to[earlier] == seen[:at], f"segment {segment} goes on from several ones"
            # Kernels of one token have no gradient. So a run repeats a parent of one token with a parent itself.
            kept = len(seen)
            while kept > 1 and lengths[seen[kept - 1]] == 1:
                kept -= 1
            own = (*seen[kept:], segment)
            runs.append(_Run(own, seen[kept - 1] if kept else -1, sum(lengths[each] for each in own)))
        parents = {run.parent for run in runs} - {-1}
        batches = [[runs[segment]] for segment in sorted(parents)]
        ends = (run for segment, run in enumerate(runs) if segment not in parents)
        for run in sorted(ends, key=lambda run: (run.parent < 0, -run.length)):
            longest = batches[-1][0] if batches else run
            alike = (run.parent < 0) == (longest.parent < 0) and longest.segments[-1] not in parents
            if batches and alike and run.length >= SHORTEST * longest.length:
                batches[-1].append(run)
            else:
                batches.append([run])
        self.batches, first = [], 0
        places = torch.empty(layout.num_tokens, dtype=torch.int64)
        for batch in batches:
            begun = tuple(run.parent for run in batch if run.parent >= 0)
            # For one token mixers would change the state in place.
            length, tokens = max([2 if begun else 1, *(run.length for run in batch)]), []
            for run in batch:
                of_segments = [layout.starts[s] + torch.arange(lengths[s]) for s in run.segments]
                tokens.append(F.pad(torch.cat(of_segments), (0, length - run.length)))
                behind = first + run.length - lengths[run.segments[-1]]
                places[of_segments[-1]] = behind + torch.arange(lengths[run.segments[-1]])
                first += length
            ends_of = tuple(run.segments[-1] for run in batch)
            at = to_device_async(torch.cat(tokens), device)
            self.batches.append(_Batch(ends_of, begun, ends_of[0] in parents, at))
        self.places = to_device_async(places, device)


_plan = functools.lru_cache(maxsize=16)(_Plan)
# The layer types of a configuration that `make_segmented` covers; empty: no layer has a state.
ROWS = RowSupport(lambda model: WITH_A_STATE if any(mixers_of(model)) else frozenset(), make_segmented)

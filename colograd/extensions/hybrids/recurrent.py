"""Layers with a recurrent state (Gated DeltaNet, Mamba-2, short convolutions) on packed rows.

transformers' own layers take their starting state from a cache object. Prompts run one by one. Completions run in
right-padded batches, and start from their prompts' states. No state is changed in place, so that gradients flow into
the prompt.
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

# Possible names of a recurrent layer's cache argument in transformers. Since 5.24: `cache`.
CACHES = ("cache", "cache_params", "past_key_values")
WITH_A_STATE = frozenset({"attention", "conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"})
SHORTEST = 0.75  # Minimum length of a batch's sequences, relative to the longest one. Bounds padding.


class Hybrids(ModelFeature):
    def why_rows_stay_whole(self, model: Any) -> str:
        shares_out = registry.hooks("shares_out_mixer")
        stay = sorted({type(mixer).__name__ for mixer in mixers_of(model) if not any(can(mixer) for can in shares_out)})
        reason = f"{type(model).__name__} has layers of {', '.join(stay)}, whose state goes from token to token"
        return reason if stay else ""


def make_segmented(model: torch.nn.Module) -> None:
    for layer in decoder_layers(model):
        if (mixers := [*mixers_of(layer)]) and not any("forward" in mixer.__dict__ for mixer in mixers):
            for mixer in mixers:
                kind: Any = type(mixer)
                mixer.layout = mixer.row_part = None
                # A bound method, because deepcopy of a layer binds the method's copy to the layer's copy.
                mixer.forward = MethodType(functools.partial(_forward, kind.forward, _cache_name(kind)), mixer)
            layer.register_forward_pre_hook(functools.partial(_hand_out, mixers), with_kwargs=True)


def keep_uncompiled(model: torch.nn.Module) -> None:
    """Keep recurrent layers out of compilation: compiled, they would need a long graph for each row layout."""
    for mixer in mixers_of(model):
        mixer.forward = MethodType(torch.compiler.disable(mixer.forward.__func__), mixer)


def mixers_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the recurrent layers: submodules with a convolution and a cache argument that aren't attention."""
    for part in module.modules():
        kind: Any = type(part)
        if any(isinstance(child, torch.nn.Conv1d) for child in part.children()) and _cache_name(kind):
            yield part


@functools.cache
def _cache_name(kind: Any) -> str:
    """Return the name of the forward's cache argument, or "" for attention and layers without a cache."""
    names = inspect.signature(kind.forward).parameters
    return "" if "position_embeddings" in names else next((name for name in CACHES if name in names), "")


def _hand_out(mixers: list[Any], layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for mixer in mixers:
        mixer.layout, mixer.row_part = kwargs.get("layout"), kwargs.get("row_part")


def _forward(own: Any, cache: str, mixer: Any, /, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # kwargs go first: since transformers 5.23 checkpointing recomputes a layer without the hook that sets attributes.
    layout, row_part = kwargs.pop("layout", mixer.layout), kwargs.pop("row_part", mixer.row_part)
    if layout is None:
        return own(mixer, hidden_states, *args, **kwargs)

    def run(mixer: Any, inputs: torch.Tensor) -> torch.Tensor:
        (batches, places), states, outputs = _plan(layout, inputs.device), dict[int, _States](), []
        for batch in batches:
            tokens = inputs[0].index_select(0, batch.tokens).unflatten(0, (len(batch.segments), -1))
            carried = _States([states[parent] for parent in batch.parents])
            outputs.append(own(mixer, tokens, **{cache: carried}).flatten(0, 1))
            if batch.is_parent:
                states[batch.segments[0]] = carried
        return torch.cat(outputs).index_select(0, places)[None]

    return run(mixer, hidden_states) if row_part is None else row_part.mix(mixer, hidden_states, run)


class _States:
    """Convolution and recurrent states of one layer for B sequences, with the interface of transformers' caches."""

    record_past = True  # If False, a layer would change the convolution's inputs in place.

    def __init__(self, parents: list[_States]) -> None:
        self.continues = bool(parents)
        self.conv_states: dict[int, torch.Tensor] = {}  # Convolutions' last K inputs, (B, channels, K).
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
        """Append ``inputs`` (B, channels, tokens) to the stored inputs, and put zeros in front if the result has fewer
        than K tokens (K: the kernel size). Store the last K tokens of the result, and return the result."""
        kernel = conv_kernel_size or inputs.shape[-1]
        if self.continues:
            inputs = torch.cat([self.conv_states[state_idx], inputs], dim=-1)
        inputs = F.pad(inputs, (max(kernel - inputs.shape[-1], 0), 0))
        self.conv_states[state_idx] = inputs[..., -kernel:]
        return inputs

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        self.recurrent_states[state_idx] = states
        return states


class _Batch(NamedTuple):
    """B sequences that a recurrent layer computes together, padded to L tokens. A sequence that later sequences
    continue (a parent) has its own batch, because padding would change its last state."""

    segments: tuple[int, ...]  # Last segment of each sequence.
    parents: tuple[int, ...]  # Segment that each sequence continues. Empty: the sequences start anew.
    is_parent: bool  # Whether later sequences continue from the state at this batch's end.
    tokens: torch.Tensor  # Index of each of the batch's tokens in the packed row, (B * L,). Padding: 0.


@functools.lru_cache(maxsize=16)
def _plan(layout: SegmentLayout, device: torch.device) -> tuple[list[_Batch], torch.Tensor]:
    """Return the batches for a packed row, and the index (T,) of each token in the batches' joined outputs."""
    # A sequence: its segments (outputs of the last one are used), its parent segment or -1, its number of tokens.
    lengths, sequences = layout.lengths, list[tuple[tuple[int, ...], int, int]]()
    for segment, seen in enumerate(layout.attends_to):
        for at, earlier in enumerate(seen):
            assert layout.attends_to[earlier] == seen[:at], f"segment {segment} goes on from several ones"
        # Kernels that continue a state by one token have no gradient. So a segment of one token behind another one is
        # no parent: later sequences compute the token again.
        kept = len(seen)
        while kept > 1 and lengths[seen[kept - 1]] == 1:
            kept -= 1
        own = (*seen[kept:], segment)
        sequences.append((own, seen[kept - 1] if kept else -1, sum(lengths[each] for each in own)))
    parents = {parent for _, parent, _ in sequences} - {-1}
    groups = [[sequences[segment]] for segment in sorted(parents)]
    ends = (sequence for segment, sequence in enumerate(sequences) if segment not in parents)
    for sequence in sorted(ends, key=lambda sequence: (sequence[1] < 0, -sequence[2])):
        longest = groups[-1][0] if groups else sequence
        alike = (sequence[1] < 0) == (longest[1] < 0) and longest[0][-1] not in parents
        if groups and alike and sequence[2] >= SHORTEST * longest[2]:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    batches, first = list[_Batch](), 0
    places = torch.empty(layout.num_tokens, dtype=torch.int64)
    for group in groups:
        begun = tuple(parent for _, parent, _ in group if parent >= 0)
        # Sequences that continue a parent are padded to two tokens or more. Layers would change the state in place if
        # they got one token.
        padded, tokens = max([2 if begun else 1, *(length for _, _, length in group)]), []
        for segments, _, length in group:
            of_segments = [layout.starts[s] + torch.arange(lengths[s]) for s in segments]
            tokens.append(F.pad(torch.cat(of_segments), (0, padded - length)))
            places[of_segments[-1]] = first + length - lengths[segments[-1]] + torch.arange(lengths[segments[-1]])
            first += padded
        last = tuple(segments[-1] for segments, _, _ in group)
        batches.append(_Batch(last, begun, last[0] in parents, to_device_async(torch.cat(tokens), device)))
    return batches, to_device_async(places, device)


ROWS = RowSupport(lambda model: WITH_A_STATE if any(mixers_of(model)) else frozenset(), make_segmented)

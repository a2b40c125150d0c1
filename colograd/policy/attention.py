"""Attention over a `SegmentLayout`: a segment of a packed row attends causally to itself and to the earlier segments
that the layout names.

Registered with transformers under `NAME`, so a decoder that goes through its attention interface runs it unchanged:

    model.set_attn_implementation(attention.NAME)
    with attention.packed_rows():
        model(input_ids, position_ids=..., layout=micro_batch.layout)

Any other call of that model (``generate`` in a notebook, a callback's forward) runs transformers' own `sdpa`.

No key is copied (`merged_attention`). On CUDA in 16 bits (or autocast), one variable-length flash call of torch reads
all segments' own keys, and another one the prompts' keys. On a CPU there is one call per segment and one per prompt.
These kernels don't compute dropout, soft caps and, on a CPU, windows. Such rows, and short prompts on a CPU
(`IN_PLACE_FROM`), run one `scaled_dot_product_attention` per segment, on a copy of its prompt's keys and its own.

Vision towers that attend within windows (`cu_seqlens`) run `tower_attention` in the same two ways (`TOWER_NAME`).
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..batch import SegmentLayout
from . import cpu_attention
from .merged_attention import Call, MergedAttention, calls_at_once, calls_one_by_one
from .sending import to_device_async

NAME = "colograd_packed"
TOWER_NAME = "colograd_flash_tower"  # transformers passes all windows at once if the name has "flash"


class RowPart(Protocol):
    """One rank's tokens of a row that several ranks compute together."""

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange this rank's tokens of all heads (1, heads, own tokens, D) for all tokens of this rank's heads."""

    def to_tokens(self, output: torch.Tensor, heads: int) -> torch.Tensor:
        """Exchange all tokens of this rank's heads (1, T, own heads, D) for this rank's tokens of all heads."""

    def to_all_tokens(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's tokens of all heads (1, own tokens, heads, D) for all tokens of this rank's heads."""

    def own_heads(self, of_heads: torch.Tensor) -> torch.Tensor:
        """Select this rank's heads from (H, ...)."""

    def own_weights(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Select the weights of this rank's tokens from the weights (T,) of the row's tokens."""

    def sum(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Turn a sum over this rank's tokens into the sum over the row's tokens."""


def packed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, layout: SegmentLayout | None = None, s_aux: torch.Tensor | None = None,
    row_part: RowPart | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention (1, T, H, D) of one packed row, with the signature of transformers' attention functions.

    Args:
        query: (1, H, T, D).
        key, value: (1, K, T, D), K dividing H (grouped-query attention).
        layout: segments and their visibility; None: the row isn't packed, and `sdpa` computes it.
        s_aux: (H,) sinks: logits of a key of value 0 that every token attends to.
        row_part: this rank's part of the row, if query, key and value have only that part's tokens; None: all T tokens.
        options: transformers' `scaling`, `dropout`, `sliding_window` (in tokens, along prompt and completion), and
            `both_ways`: first and last token + 1 of each run of tokens within a segment that also attend to later
            tokens of the run (`both_ways_in_window`: only in layers with a window).

    Raises:
        ValueError: the result would be wrong.
    """
    if row_part is not None:
        heads = query.shape[1]
        of_heads = row_part.to_heads(*_in_one_dtype(query, key, value))
        sinks = None if s_aux is None else row_part.own_heads(s_aux)
        output, _ = packed_attention(module, *of_heads, attention_mask, layout, sinks, **options)
        return row_part.to_tokens(output, heads), None
    scaling, dropout = options.pop("scaling", None), options.pop("dropout", 0.0)
    if layout is None:
        if s_aux is not None:
            return _plain_attention(query, key, value, attention_mask, scaling, dropout, s_aux), None
        for name in ("sliding_window", "softcap", "both_ways", "both_ways_in_window"):
            options.pop(name, None)
        options |= {"scaling": scaling, "dropout": dropout}
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    if query.shape[0] != 1:
        raise ValueError(f"Packed attention takes one row, not {query.shape[0]}: pass (1, T) input ids.")
    sliding_window: int | None = options.get("sliding_window")
    both_ways: Sequence[tuple[int, int]] = options.get("both_ways", ())
    if sliding_window is not None:
        both_ways = options.get("both_ways_in_window", both_ways)
    softcap: float | None = options.get("softcap")
    if [softcap is not None, s_aux is not None, bool(both_ways)].count(True) > 1:
        raise ValueError(
            "This model's attention uses two of soft-capping, sinks, and images whose tokens see each other, which "
            "packed attention doesn't compute together."
        )
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{type(module).__name__} isn't causal: packed attention would hide tokens it should see.")
    if attention_mask is not None or options.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} brings a mask or bias of its own, which packed attention would drop: the layout "
            "alone says what is visible."
        )
    if _watching is not None and sliding_window is not None:
        _watching[1].add(sliding_window)
    query, key, value = _in_one_dtype(query, key, value)
    if sliding_window is not None and layout.longest_sequence <= sliding_window:
        sliding_window = None
    row = query, key, value
    calls = _calls(query, value, layout, sliding_window) if dropout == 0.0 and softcap is None else ()
    if calls:
        output = _merged_attention(*row, calls, scaling, s_aux)
    elif s_aux is not None:
        size, scaling = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
        joined = _with_sinks(*row, s_aux, scaling)
        output = _segment_attention(*joined, layout, (scaling, dropout, None), sliding_window, sink=True)[..., :size]
    else:
        output = _segment_attention(*row, layout, (scaling, dropout, softcap), sliding_window)
    if both_ways:
        again = _seen_both_ways(*row, layout, both_ways, (scaling, dropout, sliding_window))
        places = torch.cat([torch.arange(first, end) for first, end in both_ways])
        output = output.index_copy(1, to_device_async(places, output.device), again)
    return output, None


def _in_one_dtype(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cast to autocast's dtype, if it is on: rotary embeddings leave mixed dtypes, and no fused kernel takes them."""
    dtype = autocast_dtype(tensors[0].device)
    return (x if dtype is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype; None: autocast is off."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    found: torch.dtype = torch.get_autocast_dtype(kind)
    return found


HEAD_STEP = 8  # divisor of every head size that fused kernels take


def _with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append the sinks as one more key of value 0, so that kernels need no special case.

    Heads get a further dimension: there a query has its head's sink, and every key except the new one is 0.
    """
    tokens, heads = query.shape[2], query.shape[1]
    own = (sinks.to(query.dtype) / scaling).view(1, heads, 1, 1).expand(len(query), -1, tokens, 1)
    query = F.pad(torch.cat([query, own], dim=-1), (0, HEAD_STEP - 1))
    size = key.shape[-1]
    key, value = F.pad(key, (0, HEAD_STEP)), F.pad(value, (0, HEAD_STEP, 0, 1))
    of_sinks = F.pad(key.new_ones(1), (size, HEAD_STEP - 1)).expand(*key.shape[:2], 1, -1)
    return query, torch.cat([key, of_sinks], dim=2), value


def _plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None,
    dropout: float, sinks: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with sinks, (B, T, H, D), for rows that aren't packed: `sdpa` ignores sinks."""
    size, scaling = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None:  # transformers omits `sdpa`'s mask if it would be causal with nothing hidden
        mask = _causal_mask(query.shape[2], key.shape[2], None, query.device)
    query, key, value = _with_sinks(query, key, value, sinks, scaling)
    key, value = _heads_for_masks(query, key, value)
    mask = F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
    return _fused(query, key, value, mask, dropout, scaling)[..., :size].transpose(1, 2)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    scaling: float | None, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    if dropout == 0.0 and cpu_attention.slow(query) and query.shape[-1] == value.shape[-1]:
        return cpu_attention.attention(query, key, value, mask, causal, scaling)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout,
    options: tuple[float | None, float, float | None], window: int | None, sink: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with one call per segment; (1, T, H, D).

    With a ``sink`` all tokens attend to the last key. ``options`` are scaling, dropout and soft cap.
    """
    scaling, dropout, softcap = options
    key, value = _heads_for_masks(query, key, value)
    lengths = (*layout.lengths, 1) if sink else layout.lengths
    keys, values = key.split(lengths, dim=2), value.split(lengths, dim=2)
    first = (len(layout.lengths),) if sink else ()
    outputs = []
    for index, queries in enumerate(query.split(layout.lengths, dim=2)):
        seen = (*first, *layout.attends_to[index], index)
        k = torch.cat([keys[s] for s in seen], dim=2) if len(seen) > 1 else keys[index]
        v = torch.cat([values[s] for s in seen], dim=2) if len(seen) > 1 else values[index]
        square = softcap is None and len(seen) == 1 and (window is None or k.shape[2] <= window)
        mask = None if square else _causal_mask(queries.shape[2], k.shape[2], window, query.device, sink)
        if softcap is None or mask is None:
            outputs.append(_fused(queries, k, v, mask, dropout, scaling, square))
            continue
        # No kernel of torch computes soft caps, so the scores of one segment at a time exist in memory.
        times = queries.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (k, v))
        scores = queries @ k.mT * (queries.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
        outputs.append(F.dropout(scores.softmax(-1, dtype=torch.float32).to(v.dtype), dropout) @ v)
    # Same memory layout as merged calls, so that compiled layers have one graph for both.
    return torch.cat([part.transpose(1, 2) for part in outputs], dim=1)


def _heads_for_masks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with the number of heads that torch's kernels with masks take."""
    if query.device.type == "cpu" or query.shape[1] == key.shape[1]:
        return key, value
    # On a GPU the fused kernel for masks takes no grouped heads; torch would fall back to one that stores all scores.
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _seen_both_ways(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout, runs: Sequence[tuple[int, int]],
    options: tuple[float | None, float, int | None],
) -> torch.Tensor:  # fmt: skip
    """Compute attention (1, tokens of all runs, H, D) of tokens that attend to everything before their run's end.

    ``options`` are scaling, dropout and window.
    """
    scaling, dropout, window = options
    key, value = _heads_for_masks(query, key, value)
    starts, again = layout.starts, []
    for first, end in runs:
        segment = bisect.bisect_right(starts, first) - 1
        seen = [slice(starts[s], starts[s] + layout.lengths[s]) for s in layout.attends_to[segment]]
        keys, values = (
            torch.cat([x[:, :, part] for part in (*seen, slice(starts[segment], end))], dim=2) for x in (key, value)
        )
        count, mask = keys.shape[2], None
        if window is not None and count > window:
            places = torch.arange(count, device=query.device)
            mask = places[first - end :, None] - places[None, :] < window
        again.append(_fused(query[:, :, first:end], keys, values, mask, dropout, scaling))
    return torch.cat(again, dim=2).transpose(1, 2)


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device, sink: bool = False) -> torch.Tensor:
    """Return a mask (queries, keys) bool, causal with the last query at the last key; a ``sink`` is the first key.

    Shapes repeat in every layer, so small masks are cached; 256 large ones would take gigabytes.
    """
    make = _make_mask if queries * keys <= 2**20 else _make_mask.__wrapped__
    return make(queries, keys, window, device, sink)


@functools.lru_cache(maxsize=256)
def _make_mask(queries: int, keys: int, window: int | None, device: torch.device, sink: bool) -> torch.Tensor:
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if sink:
        mask[:, 0] = True
    return mask


FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY = (8, 0)  # compute capability of the first GPUs with flash attention: Ampere
FLASH_HEAD = 256  # largest head size of flash attention


def _flash_takes(query: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in FLASH_DTYPES
        and query.shape[-1] <= FLASH_HEAD
        and query.shape[-1] % HEAD_STEP == 0
        and _capability(query.device) >= FLASH_CAPABILITY
    )


_capability = functools.cache(torch.cuda.get_device_capability)


# A CPU reads the keys of earlier segments in place if the segments have at least this many tokens on average. Keys of
# shorter segments are copied, because that is faster (docs/measurements.md).
IN_PLACE_FROM = 128

_in_place_from = IN_PLACE_FROM


@contextmanager
def _with(**values: Any) -> Iterator[None]:
    """Replace globals of this module while the context lasts."""
    before = {name: globals()[name] for name in values}
    globals().update(values)
    try:
        yield
    finally:
        globals().update(before)


def keys_in_place_from(tokens: int) -> AbstractContextManager[None]:
    """Replace the threshold `IN_PLACE_FROM` for the forwards in the body."""
    return _with(_in_place_from=tokens)


def _calls(query: torch.Tensor, value: torch.Tensor, layout: SegmentLayout, window: int | None) -> tuple[Call, ...]:
    """Return the calls of fused kernels for this row; empty: no fused kernel takes it."""
    if _flash_takes(query) and value.shape[-1] <= query.shape[-1]:  # narrower values are padded
        return calls_at_once(layout, window, query.device)
    if query.device.type != "cpu" or window is not None or query.shape[-1] != value.shape[-1]:
        return ()
    seen = [layout.lengths[segment] for earlier in layout.attends_to for segment in earlier]
    return calls_one_by_one(layout) if seen and sum(seen) >= _in_place_from * len(seen) else ()


def _merged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: tuple[Call, ...], scaling: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the fused kernels' calls and merge their results; (1, T, H, D)."""
    size = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - size))  # latent attention has keys longer than its values
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    found: torch.Tensor = MergedAttention.apply(q, k, v, sinks, calls, scale)
    return found[..., :size].unsqueeze(0)


def tower_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute a vision tower's attention (1, T, H, D): each patch attends to its whole window.

    Args:
        query, key, value: (1, H, T, D), of all windows one after the other.
        cu_seq_lens_q: (windows + 1,) int32, on the queries' device: number of patches before each window, then T;
            None: one window.
        max_length_q: patches of the largest window; older transformers pass a tensor, and the host waits for its value.
        options: transformers' `scaling`, `dropout` and other options of `sdpa`. Keys and queries have the same windows.
    """
    scaling, dropout = options.pop("scaling", None), options.pop("dropout", 0.0)
    for name in ("cu_seq_lens_k", "max_length_k"):
        options.pop(name, None)
    query, key, value = _in_one_dtype(query, key, value)
    fits = query.shape[-1] % HEAD_STEP == 0 and dropout == 0.0 and _flash_takes(query)
    if cu_seq_lens_q is not None and max_length_q is not None and fits:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        scale, longest = scaling if scaling is not None else q.shape[-1] ** -0.5, int(max_length_q)
        call = Call(None, None, False, None, (cu_seq_lens_q, cu_seq_lens_q, longest, longest))
        found: torch.Tensor = MergedAttention.apply(q, k, v, None, (call,), scale)
        return found.unsqueeze(0), None
    # Without flash attention (in float32, for example), call `sdpa` once per window, as transformers does. On a GPU the
    # host waits here for the windows' lengths.
    lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    windows = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    parts = [own(module, *each, attention_mask, scaling=scaling, dropout=dropout, **options)[0] for each in windows]
    return torch.cat(parts, dim=1), None


def _mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask for packed rows, because their layout defines visibility; else return `sdpa`'s mask."""
    if not _packed_rows:
        windowed = {} if local_size is None else {"local_size": local_size}
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **windowed, **kwargs)
    if _watching is not None and local_size:  # Qwen2-MoE makes a mask of 0 tokens for layers that it doesn't have
        _watching[0].add(local_size)
    return None


_packed_rows = False


def packed_rows() -> AbstractContextManager[None]:
    """Make no masks for forwards in the body: transformers makes masks before the layers receive the layout."""
    return _with(_packed_rows=True)


_watching: tuple[set[int], set[int]] | None = None  # see `watch_windows`


@contextmanager
def watch_windows() -> Iterator[tuple[set[int], set[int]]]:
    """Record sliding windows in tokens while the context lasts: windows of masks, and windows that layers applied.

    A window that only the masks have would be ignored silently, because packed rows have no masks.
    """
    windows = set[int](), set[int]()
    with _with(_watching=windows):
        yield windows


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(TOWER_NAME, tower_attention)
AttentionMaskInterface.register(NAME, _mask)

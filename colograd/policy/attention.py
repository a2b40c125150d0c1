"""Attention of packed rows, registered in transformers under `NAME`.

Each segment (e.g. a prompt or completion) attends causally to its own tokens, and to all tokens of the earlier segments
that the row's `SegmentLayout` lists for it. A sliding window leaves only the nearest of these tokens.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..batch import SegmentLayout
from .merged_attention import Call, MergedAttention, calls_at_once, calls_one_by_one, slow
from .sending import to_device_async

NAME = "colograd_packed"
RowPart: TypeAlias = Any  # `RowPart` of extension `sequence_parallel`: this rank's share of a row's tokens.


@dataclass(eq=False, slots=True)
class ImageRuns:
    """Ranges of a row's image tokens. A plain list would make torch compile layers again for each number of images."""

    places: Sequence[tuple[int, int]]  # (first, last + 1) for each image.


def packed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, layout: SegmentLayout | None = None, s_aux: torch.Tensor | None = None,
    row_part: RowPart | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention (1, T, H, V) of one packed row, with the signature of transformers' attention functions.

    Args:
        query: (1, H, T, D), for H query heads, T tokens and head size D.
        key, value: (1, K, T, D) and (1, K, T, V), for K key-value heads (K divides H) and head size V of values.
        layout: the row's segments, and which segments each attends to. None means a row that isn't packed.
        s_aux: (H,) sinks, logits of an additional key with value 0 that every token attends to.
        row_part: this rank's share of the row, if query, key and value have only that share's tokens.
        options: transformers' options, and two `ImageRuns` of the row. Tokens in `both_ways` attend to all tokens of
            their image. In layers with a sliding window, `both_ways_in_window` replaces `both_ways`, if passed.
    """
    if row_part is not None:
        heads = query.shape[1]
        query, key, value = row_part.to_heads(*in_one_dtype(query, key, value))
        sinks = None if s_aux is None else row_part.own_heads(s_aux)
        output, _ = packed_attention(module, query, key, value, attention_mask, layout, sinks, **options)
        return row_part.to_tokens(output, heads), None
    scaling, dropout = options.pop("scaling", None) or query.shape[-1] ** -0.5, options.pop("dropout", 0.0)
    size = value.shape[-1]
    if layout is None:
        if s_aux is not None:
            # transformers' `sdpa` ignores sinks, so it isn't called here. A mask of None means causal attention.
            mask = attention_mask
            if mask is None:
                mask = _causal_mask(query.shape[2], key.shape[2], None, query.device)
            query, key, value = _with_sinks(query, key, value, s_aux, scaling)
            key, value = _heads_for_masks(query, key, value)
            mask = F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
            return _fused(query, key, value, mask, dropout, scaling)[..., :size].transpose(1, 2), None
        for name in ("sliding_window", "softcap", "both_ways", "both_ways_in_window"):
            options.pop(name, None)
        options |= {"scaling": scaling, "dropout": dropout}
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    if query.shape[0] != 1:
        raise ValueError(f"Packed attention takes one row, not {query.shape[0]}: pass input ids of shape (1, tokens).")
    sliding_window: int | None = options.get("sliding_window")
    runs: ImageRuns | None = options.get("both_ways")
    if sliding_window is not None:
        runs = options.get("both_ways_in_window", runs)
    both_ways = () if runs is None else runs.places
    softcap: float | None = options.get("softcap")
    if [softcap is not None, s_aux is not None, bool(both_ways)].count(True) > 1:
        raise ValueError(
            "This model's attention combines two of these: soft-capping, sinks, and image tokens that attend to each "
            "other. Packed attention supports only one of the three."
        )
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{type(module).__name__} isn't causal, but packed attention can only be causal.")
    if attention_mask is not None or options.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} passes an attention mask or bias, but packed attention reads only the row's "
            "layout and would ignore them."
        )
    if _watching is not None and sliding_window is not None:
        _watching[1].add(sliding_window)
    query, key, value = in_one_dtype(query, key, value)
    if sliding_window is not None and layout.longest_sequence <= sliding_window:
        sliding_window = None
    row = query, key, value
    calls = _calls(query, value, layout, sliding_window) if dropout == 0.0 and softcap is None else ()
    if calls:
        output = run_merged(*row, calls, scaling, s_aux)
    else:
        joined = row if s_aux is None else _with_sinks(*row, s_aux, scaling)
        of_layer, has_sink = (scaling, dropout, softcap), s_aux is not None
        output = _segment_attention(*joined, layout, of_layer, sliding_window, has_sink)[..., :size]
    if both_ways:
        again = _seen_both_ways(*row, layout, both_ways, (scaling, dropout, sliding_window))
        places = torch.cat([torch.arange(first, end) for first, end in both_ways])
        output = output.index_copy(1, to_device_async(places, output.device), again)
    return output, None


def in_one_dtype(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cast ``tensors`` to autocast's dtype: rotary embeddings may return float32, but fused kernels take one dtype."""
    dtype = autocast_dtype(tensors[0].device)
    return (x if dtype is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    kind = device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


HEAD_STEP = 8  # Fused kernels take head sizes that are multiples of 8.


def _with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append the sinks as one more key, whose value is 0, because kernels take no sinks.

    Each head's size grows by `HEAD_STEP`. One of the new dimensions holds the sink's logit.
    """
    tokens, heads = query.shape[2], query.shape[1]
    own = (sinks.to(query.dtype) / scaling).view(1, heads, 1, 1).expand(len(query), -1, tokens, 1)
    query = F.pad(torch.cat([query, own], dim=-1), (0, HEAD_STEP - 1))
    size = key.shape[-1]
    key, value = F.pad(key, (0, HEAD_STEP)), F.pad(value, (0, HEAD_STEP, 0, 1))
    of_sinks = F.pad(key.new_ones(1), (size, HEAD_STEP - 1)).expand(*key.shape[:2], 1, -1)
    return query, torch.cat([key, of_sinks], dim=2), value


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    scaling: float, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    if dropout == 0.0 and slow(query) and query.shape[-1] == value.shape[-1] and len(query) == 1:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        row = (x[0].transpose(0, 1) for x in (query, key, value))
        return MergedAttention.apply(*row, None, (Call(None, None, causal, mask=mask),), scaling).transpose(0, 1)[None]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout,
    options: tuple[float, float, float | None], window: int | None, sink: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute attention segment by segment. With ``sink`` the row's last key is a sink."""
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
        # torch has no fused kernel with soft caps.
        times = queries.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (k, v))
        scores = queries @ k.mT * scaling
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
        outputs.append(F.dropout(scores.softmax(-1, dtype=torch.float32).to(v.dtype), dropout) @ v)
    # The output has the memory layout of `MergedAttention`, so that compiled layers need only one graph.
    return torch.cat([part.transpose(1, 2) for part in outputs], dim=1)


def _heads_for_masks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if query.device.type == "cpu" or query.shape[1] == key.shape[1]:
        return key, value
    # torch's fused GPU kernel for masks needs as many key heads as query heads. Other kernels store all scores.
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _seen_both_ways(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SegmentLayout, runs: Sequence[tuple[int, int]],
    options: tuple[float, float, int | None],
) -> torch.Tensor:  # fmt: skip
    """Compute attention of the image tokens in ``runs``. They also attend to later tokens of their image."""
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
    """Return a causal mask, bool (queries, keys), True where a query attends.

    The last query and the last key belong to one token. Masks above 1 MiB aren't cached: the cache keeps 256 masks.
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


def flash_takes(query: torch.Tensor) -> bool:
    size = query.shape[-1]
    fits = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % HEAD_STEP == 0
    return fits and _capability(query.device) >= (8, 0)


_capability = functools.cache(torch.cuda.get_device_capability)


# Mean prompt length in tokens. Below it, attention on a CPU copies prompts' keys, which is faster for short prompts.
IN_PLACE_FROM = 128
_in_place_from = IN_PLACE_FROM
_packed_rows = False
_watching: tuple[set[int], set[int]] | None = None


@contextmanager
def _with_globals(**values: Any) -> Iterator[None]:
    before = {name: globals()[name] for name in values}
    globals().update(values)
    try:
        yield
    finally:
        globals().update(before)


def keys_in_place_from(tokens: int) -> AbstractContextManager[None]:
    return _with_globals(_in_place_from=tokens)


def _calls(query: torch.Tensor, value: torch.Tensor, layout: SegmentLayout, window: int | None) -> tuple[Call, ...]:
    if flash_takes(query) and value.shape[-1] <= query.shape[-1]:  # `run_merged` pads values to the size of keys.
        return calls_at_once(layout, window, query.device)
    if query.device.type != "cpu" or window is not None or query.shape[-1] != value.shape[-1]:
        return ()
    seen = [layout.lengths[segment] for earlier in layout.attends_to for segment in earlier]
    return calls_one_by_one(layout) if seen and sum(seen) >= _in_place_from * len(seen) else ()


def run_merged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: tuple[Call, ...], scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    size = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - size))  # Latent attention's values are smaller than its keys.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return MergedAttention.apply(q, k, v, sinks, calls, scaling)[..., :size].unsqueeze(0)


def _mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    if not _packed_rows:
        windowed = {} if local_size is None else {"local_size": local_size}
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **windowed, **kwargs)
    if _watching is not None and local_size:  # Qwen2-MoE also makes a mask with a window of 0, which no layer uses.
        _watching[0].add(local_size)
    return None


def packed_rows() -> AbstractContextManager[None]:
    """Return a context where `_mask` makes no masks, because the layout of a packed row replaces them."""
    return _with_globals(_packed_rows=True)


@contextmanager
def watch_windows() -> Iterator[tuple[set[int], set[int]]]:
    """Yield two sets: window sizes of masks that transformers requests, and window sizes passed to packed attention.

    The sets are filled inside the context. Packed rows use no masks, so a window that only masks have isn't applied.
    """
    windows = set[int](), set[int]()
    with _with_globals(_watching=windows):
        yield windows


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)

"""Bidirectional attention among the tokens of an image, in a vLLM engine on a CPU.

Gemma 3 has this attention in all layers, the large models of Gemma 4 in layers with a sliding window. vLLM's CPU
backend computes image tokens causally, like text. Here image tokens are computed a second time, as separate requests
that end with the image and aren't causal: each token attends to everything before the image, and to the whole image.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..towers import see_both_ways


@dataclasses.dataclass
class Pictures:
    """The image tokens of an engine step, arranged as separate requests without a causal mask."""

    tokens: torch.Tensor  # Indices of the image tokens among the engine step's tokens, [n].
    metadata: cpu_attn.CPUAttentionMetadata
    in_window: bool  # Whether attention is bidirectional in layers with a sliding window only.


class MetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """vLLM's metadata builder. It adds the attribute ``pictures``: a `Pictures`, or None for a step without images."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata, step = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        metadata.pictures = None
        starts, ends = step.query_start_loc_cpu.tolist(), step.seq_lens.tolist()
        tokens, rows, counts, seen = list[int](), list[int](), list[int](), list[int]()
        for row, ranges in (step.mm_req_doc_ranges or {}).items():
            computed = ends[row] - (starts[row + 1] - starts[row])  # Number of the request's tokens before this step.
            for first, last in ranges:
                begin, end = max(first, computed), min(last + 1, ends[row])
                if begin < end:
                    tokens += range(starts[row] + begin - computed, starts[row] + end - computed)
                    rows.append(row)
                    counts.append(end - begin)
                    seen.append(end)
        if not rows:
            return metadata
        queries = torch.tensor([0, *counts], dtype=step.query_start_loc.dtype).cumsum(0, dtype=torch.int32)
        of_pictures = dataclasses.replace(
            step,
            query_start_loc=queries,
            query_start_loc_cpu=queries,
            seq_lens=torch.tensor(seen, dtype=step.seq_lens.dtype),
            num_reqs=len(rows),
            num_actual_tokens=len(tokens),
            max_query_len=max(counts),
            max_seq_len=max(seen),
            block_table_tensor=step.block_table_tensor[rows],
            causal=False,
            mm_req_doc_ranges=None,
        )
        where = see_both_ways(self.vllm_config.model_config.hf_config)
        metadata.pictures = Pictures(torch.tensor(tokens), super().build(0, of_pictures), where == "window")
        return metadata


class Attention(cpu_attn.CPUAttentionBackendImpl):
    """vLLM's CPU attention, followed by a second computation of image tokens without the causal mask."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *more: Any,
        **given: Any,
    ) -> Any:  # fmt: skip
        done = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more, **given)
        pictures = getattr(attn_metadata, "pictures", None)
        if pictures is not None and not (pictures.in_window and self.sliding_window == -1):
            at = pictures.tokens
            again = torch.empty_like(output[: len(at)])
            super().forward(layer, query[at], key[at], value[at], kv_cache, pictures.metadata, again, *more, **given)
            output[at] = again
        return done


class BothWays(cpu_attn.CPUAttentionBackend):
    """vLLM's CPU attention backend, which also accepts models with bidirectional image tokens."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder


@contextlib.contextmanager
def both_ways() -> Iterator[None]:
    """Context that makes vLLM build engines on a CPU with bidirectional attention among an image's tokens."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{BothWays.__module__}.{BothWays.__qualname__}")
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()

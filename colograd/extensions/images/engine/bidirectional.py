"""Bidirectional attention among an image's tokens for vLLM's CPU backend, where attention is otherwise causal.

A bidirectional layer first computes causal attention for all tokens. Then it computes image tokens again, without a
causal mask. In this second call each image counts as one request, whose context ends with the image's last token.
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
    """Image tokens of an engine step, and vLLM's attention metadata with one request per image."""

    tokens: torch.Tensor  # [n], indices of the image tokens among the step's tokens
    metadata: cpu_attn.CPUAttentionMetadata
    only_in_window: bool


class MetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """Builder that adds ``pictures`` to vLLM's attention metadata: a `Pictures`, or None without image tokens."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata, step = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        metadata.pictures = None
        starts, ends = step.query_start_loc_cpu.tolist(), step.seq_lens.tolist()
        tokens, rows, counts, seen = list[int](), list[int](), list[int](), list[int]()
        for row, ranges in (step.mm_req_doc_ranges or {}).items():
            computed = ends[row] - (starts[row + 1] - starts[row])  # number of the request's tokens from earlier steps
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
    """vLLM's CPU attention that computes image tokens again, without causal mask, in bidirectional layers."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *more: Any,
        **given: Any,
    ) -> Any:  # fmt: skip
        done = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more, **given)
        pictures = getattr(attn_metadata, "pictures", None)
        if pictures is not None and not (pictures.only_in_window and self.sliding_window == -1):
            at = pictures.tokens
            again = torch.empty_like(output[: len(at)])
            super().forward(layer, query[at], key[at], value[at], kv_cache, pictures.metadata, again, *more, **given)
            output[at] = again
        return done


class BothWays(cpu_attn.CPUAttentionBackend):
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
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{BothWays.__module__}.{BothWays.__qualname__}")
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()

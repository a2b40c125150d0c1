"""Attention within a picture in both directions, on a CPU: for models whose image tokens see each other (Gemma 3; of
Gemma 4's large ones in layers with a window).

vLLM's CPU backend computes them causally, as tokens of text. Here they are computed once more, as requests of their own
that end with the picture and aren't causal: each token sees all before the picture, and all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..policy.images import see_both_ways


@dataclasses.dataclass
class Pictures:
    """The tokens of pictures among those of a step of the engine, as requests of their own."""

    tokens: torch.Tensor  # [n] where they are among the step's
    metadata: cpu_attn.CPUAttentionMetadata
    in_window: bool  # they see each other in layers with a window alone


class MetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """vLLM's, with `Pictures` as the metadata's attribute ``pictures``; None: the step has none."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.pictures = self._pictures(common_attn_metadata)
        return metadata

    def _pictures(self, step: Any) -> Pictures | None:
        starts, ends = step.query_start_loc_cpu.tolist(), step.seq_lens.tolist()
        tokens, rows, counts, seen = list[int](), list[int](), list[int](), list[int]()
        for row, ranges in (step.mm_req_doc_ranges or {}).items():
            computed = ends[row] - (starts[row + 1] - starts[row])  # tokens of the request before this step
            for first, last in ranges:
                begin, end = max(first, computed), min(last + 1, ends[row])
                if begin < end:
                    tokens += range(starts[row] + begin - computed, starts[row] + end - computed)
                    rows.append(row)
                    counts.append(end - begin)
                    seen.append(end)
        if not rows:
            return None
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
        return Pictures(torch.tensor(tokens), super().build(0, of_pictures), where == "window")


class Attention(cpu_attn.CPUAttentionBackendImpl):
    """vLLM's, after which the tokens of pictures are computed again, not causally."""

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
    """vLLM's attention on a CPU, which takes models with such pictures too."""

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
    """Engines that are built while it lasts have this attention."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{BothWays.__module__}.{BothWays.__qualname__}")
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()

"""A model that is too large for the tests, by its configuration alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from colograd.memory.choice import Run
from colograd.memory.shape import Lengths, Shape
from colograd.memory.table import GIB
from colograd.memory.ways import PolicySizes
from colograd.policy.outline import outline, with_adapter

# Of Qwen2.5-7B.
LAYERS, HIDDEN, INNER, HEADS, KEYS, HEAD, VOCABULARY = 28, 3584, 18944, 28, 4, 128, 152064
QWEN = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    "max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
# Projections with the biases of queries, keys and values, the MLP, two norms.
BLOCK = (
    2 * HIDDEN * HEADS * HEAD + 2 * HIDDEN * KEYS * HEAD + (HEADS + 2 * KEYS) * HEAD + 3 * HIDDEN * INNER + 2 * HIDDEN
)
ENDS = 2 * VOCABULARY * HIDDEN + HIDDEN  # embedding, head, the last norm
PARAMETERS = LAYERS * BLOCK + ENDS  # 7.62 billion


def folder(place: Path) -> Path:
    """A folder with the configuration and nothing else."""
    Qwen2Config(**QWEN).save_pretrained(place)
    return place


@functools.cache
def sizes(place: Path, rank: int = 0) -> tuple[Shape, PolicySizes]:
    """Of the policy in bfloat16; with a LoRA of ``rank`` if above 0."""
    model: Any = outline(str(place), torch.bfloat16)
    model = with_adapter(model, rank) if rank else model
    return Shape.of(model.config), PolicySizes.of(model, "adamw_split", 2)


def run(place: Path, **changes: Any) -> Run:
    """Of an empty GPU of 80 GiB among 8, contexts of 8,192 tokens and 64 sequences in each engine."""
    shape, of_policy = sizes(place, changes.pop("rank", 0))
    settings: dict[str, Any] = {
        "device": "a GPU", "on_gpu": True, "total": 80 * GIB, "available": 80 * GIB, "ranks": 8, "ranks_per_engine": 1,
        "shape": shape, "sizes": of_policy, "itemsize": 2, "engine_itemsize": 2, "cache_itemsize": 2, "length": 8192,
        "sequences": 64, "running": 64, "lengths": Lengths(1024, 7168, 8), "tokens": 0,
    }  # fmt: skip
    return Run(**(settings | changes))

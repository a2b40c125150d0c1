"""Models that are too large for the tests, by their configurations alone."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen2Config

from colograd.config import ModelConfig
from colograd.memory.description import STRATEGIES, WHOLE, Devices, PolicySizes, RunDescription
from colograd.memory.estimate import RankBytes, bytes_per_rank
from colograd.memory.shape import Lengths, Shape
from colograd.memory.table import GIB
from colograd.policy.loading import outline, with_adapter

# Qwen2.5-7B
LAYERS, HIDDEN, INNER, HEADS, KEYS, HEAD, VOCABULARY = 28, 3584, 18944, 28, 4, 128, 152064
QWEN = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    "max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
# Models in docs/guide/out-of-memory.md: hidden, MLP, layers, heads, key-value heads, vocabulary, tied head.
SHAPES = {
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-7B": (HIDDEN, INNER, LAYERS, HEADS, KEYS, VOCABULARY, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, False),
    "Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128256, False),
}
# projections with biases, the MLP, two norms
BLOCK = (
    2 * HIDDEN * HEADS * HEAD + 2 * HIDDEN * KEYS * HEAD + (HEADS + 2 * KEYS) * HEAD + 3 * HIDDEN * INNER + 2 * HIDDEN
)
ENDS = 2 * VOCABULARY * HIDDEN + HIDDEN  # embedding, head, the last norm
PARAMETERS = LAYERS * BLOCK + ENDS  # 7.62 billion


def folder(place: Path) -> Path:
    """Make a folder with a configuration only."""
    Qwen2Config(**QWEN).save_pretrained(place)
    return place


def folder_of(name: str, place: Path) -> Path:
    """Make a folder with the configuration of one of `SHAPES`."""
    hidden, inner, layers, heads, keys, vocabulary, tied = SHAPES[name]
    shape = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }  # fmt: skip
    (LlamaConfig if name.startswith("Llama") else Qwen2Config)(**shape).save_pretrained(place / name)
    return place / name


@functools.cache
def sizes(place: Path, rank: int = 0) -> tuple[Shape, PolicySizes]:
    """Return the sizes of a bfloat16 policy, with a LoRA of ``rank`` if above 0."""
    model: Any = outline(str(place), torch.bfloat16)
    lora = {"use_peft": True, "lora_r": rank, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
    model = with_adapter(model, ModelConfig(**lora).peft_config()) if rank else model
    return Shape.of(model.config), PolicySizes.of(model, "adamw_split", 2)


def run(place: Path, **changes: Any) -> RunDescription:
    """Describe a run on 8 empty GPUs of 80 GiB, with contexts of 8,192 tokens and 64 sequences in each engine."""
    rank = changes.pop("rank", 0)
    shape, of_policy = sizes(place, rank)
    return changed(_described(shape, of_policy), **({"strategies": WHOLE if rank else STRATEGIES} | changes))


def on_each_rank(strategy: str, of_policy: PolicySizes, ranks: int, **changes: Any) -> RankBytes:
    """Return the bytes of a policy on each of ``ranks`` GPUs."""
    shape = Shape(1, 1, 1, 1, 1, 1, 1)  # the policy's bytes don't depend on it
    return bytes_per_rank(changed(_described(shape, of_policy), ranks=ranks, **changes), strategy)


def _described(shape: Shape, of_policy: PolicySizes) -> RunDescription:
    return RunDescription(
        devices=Devices(8, 80 * GIB, 80 * GIB), ranks_per_engine=1, shape=shape, sizes=of_policy, engine_itemsize=2,
        cache_itemsize=2, length=8192, sequences=64, running=64, lengths=Lengths(1024, 7168, 8), tokens=0,
    )  # fmt: skip


def changed(run: RunDescription, **changes: Any) -> RunDescription:
    """Return the run with other values of its fields, or of its devices' fields."""
    of_devices = {f.name for f in dataclasses.fields(Devices)} & set(changes)
    devices = dataclasses.replace(run.devices, **{name: changes.pop(name) for name in of_devices})
    return dataclasses.replace(run, devices=devices, **changes)

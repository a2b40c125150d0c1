"""Make a folder with a model of a published shape, random weights in bfloat16 and a byte tokenizer.

    python tests/benchmarks/random_model.py FOLDER [--shape qwen3-0.6b | --tiny]

For throughput and memory on a machine without a network. The shape is SmolLM2-135M's where none is named; `--tiny`: the
model of the tests, for a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # tests/helpers/tiny.py

import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMOLLM2 = "smollm2-135m"
# shapes from the models' config.json; the context may be longer
SHAPES: Mapping[str, Mapping[str, object]] = {
    SMOLLM2: {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    },
    "smollm2-2-layers": {  # two layers of SmolLM2 and a tiny head, to compare layers
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 512, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip


def make(folder: Path, shape: str = SMOLLM2) -> Path:
    sizes = dict(SHAPES[shape])
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens([f"~{index}" for index in range(int(str(sizes["vocab_size"])) - len(tokenizer))])  # ids decode
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, **ends)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="random_model.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=tuple(SHAPES), default=SMOLLM2)
    parser.add_argument("--tiny", action="store_true", help="two layers of 64, for a CPU")
    options = parser.parse_args()
    print(tiny.make_model(options.folder, context=1024) if options.tiny else make(options.folder, options.shape))

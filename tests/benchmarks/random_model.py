"""Make a folder with a Llama of SmolLM2-135M's shape, random weights in bfloat16 and a byte tokenizer.

    python tests/benchmarks/random_model.py FOLDER [--tiny]

For throughput and memory on a machine without a network. `--tiny`: the model of the tests, for a CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # tests/helpers/tiny.py

import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def make(folder: Path) -> Path:
    """Save it."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens([f"~{index}" for index in range(SMOLLM2["vocab_size"] - len(tokenizer))])  # every id decodes
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2, **ends)).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="random_model.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="two layers of 64, for a CPU")
    options = parser.parse_args()
    print(tiny.make_model(options.folder, context=1024) if options.tiny else make(options.folder))

"""The memory plan's activations compared with bytes counted on a fake GPU (helpers/fake_gpu.py).

    python tests/benchmarks/activations.py [--models 0.5B 7B] [--tokens 1024 8192] [--out F.json]

Qwen2.5's shapes in bfloat16 with all their layers, one packed row: a prompt and seven completions of its length. Each
cell has the peak of a forward and backward pass without weights and gradients, in GiB, and plan / counted. "again":
with gradient_checkpointing. No CUDA, no numbers: a quarter of a minute of a processor per cell.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "helpers"), str(HERE.parents[2])]

import fake_gpu  # noqa: E402
import native_library  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip
TOKENS = (1024, 8192, 32768, 131072)
PARTS = 8  # parts of a row: a prompt and completions of its length


def cell(model: str, tokens: int, again: bool) -> dict[str, Any]:
    """Return planned and peak bytes. The process must have the fake GPU."""
    import fake_gpu_cases as cases
    from transformers import Qwen2Config, Qwen2ForCausalLM

    part = tokens // PARTS
    with fake_gpu.FakeGPU() as gpu:
        config = Qwen2Config(**SHAPES[model], max_position_embeddings=tokens)
        policy = cases.bfloat16(Qwen2ForCausalLM, config)
        if again:
            policy.gradient_checkpointing_enable({"use_reentrant": False})
        found = cases.step(gpu, policy, [(part, [part] * (PARTS - 1))], warm=False)
        planned = cases.plan(policy, int(again), cases.Lengths(part, 8 * part, PARTS - 1), tokens)
    return {"model": model, "tokens": tokens, "again": again, "plan": planned, "peak": found["peak"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        for tokens in args.tokens:
            for again in (False, True):
                print(json.dumps(cell(args.inside, tokens, again)), flush=True)
        return
    if reason := native_library.why_not():
        raise SystemExit(f"activations: there can't be a fake GPU here: {reason}")
    found = []
    heads = [f"{tokens // 1024}k {way}" for tokens in args.tokens for way in ("", "again")]
    print("| GiB: counted (plan / counted) |", " | ".join(head.strip() for head in heads), "|")
    print("| --- |", " | ".join("---" for _ in heads), "|")
    for model in args.models:
        cells = fake_gpu.run(HERE, "--inside", model, "--tokens", *map(str, args.tokens), patience=36000)
        row = (f"{one['peak'] / 2**30:.1f} ({one['plan'] / one['peak']:.2f})" for one in cells)
        print(f"| {model} |", " | ".join(row), "|", flush=True)
        found += cells
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""The proof of the weights for ranks that share an engine, while one rank computes with a copy of one parameter.

    torchrun --nproc-per-node 2 detached_ranks.py MODEL OUT_DIR

Started by tests/extensions/tensor_parallel/test_tensor_parallel.py. Each rank writes the proof's result for the whole
engine, and for each copied parameter whether the proof found it: all parameters at once, and one by one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import torch
from detached import detached
from transformers import AutoModelForCausalLM

from colograd.engine.vllm_engine import VLLMEngine
from colograd.weights import proof
from colograd.weights.mapping import map_parameters

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FEW = ("embed_tokens.weight", "0.self_attn.k_proj.weight", "1.mlp.down_proj.weight", "1.input_layernorm.weight")


def main(model: Path, out: Path) -> None:
    config = tiny.config(out, vllm_tensor_parallel_size=RANKS)
    engine = VLLMEngine(str(model), config, torch.float32, context=64, kv_bytes=2**22)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    slices = map_parameters(policy, engine.tensors, engine.layout.engine_place, RANKS)
    shown = proof.read_together(slices, policy, engine, slices)
    told = {"alone": sorted({part.name for part in slices} - shown), "errors": {}}
    assert proof.check_read(slices, policy, engine) == []
    for part in slices:
        with detached(engine, part) if RANK == RANKS - 1 else nullcontext():
            assert part.name not in proof.read_together(slices, policy, engine, slices), part.name
            if part.name.endswith(FEW):
                try:
                    proof.check_read(slices, policy, engine)
                except RuntimeError as error:
                    told["errors"][part.name] = str(error)
    told["parameters"] = len(slices)
    (out / f"detached-{RANK}.json").write_text(json.dumps(told))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

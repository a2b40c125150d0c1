"""Train an adapter on a quantised base on several ranks and write each rank's results.

For tests/extensions/quantized/test_quantized.py, and with prompts that have images for
tests/extensions/images/test_quantized_images.py.

torchrun --nproc-per-node 2 quantized_ranks.py MODEL RUN_DIR OUT_DIR SHARDING [TARGETS-FOR-IMAGES]

SHARDING: how the ranks share the adapter's training out, or `one engine`: that both share one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import peft
import tiny
import tiny_images
import torch

from colograd import GRPOTrainer


def digest(tensors) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    model, run_dir, out_dir, sharding = sys.argv[1:5]
    asked = {"dtype": "float32", "quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    shared: dict[str, object] = {"vllm_tensor_parallel_size": 2} if sharding == "one engine" else {"sharding": sharding}
    args = tiny.config(run_dir, model_init_kwargs=asked, max_steps=3, learning_rate=1e-2, **shared)
    prompts, targets = (tiny_images.prompts(8), sys.argv[5]) if len(sys.argv) > 5 else (tiny.prompts(), "all-linear")
    lora = peft.LoraConfig(r=4, target_modules=targets)
    trainer = GRPOTrainer(model, tiny.vowels, args, prompts, peft_config=lora)
    trainer.train()
    trainer.publish()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    result = {
        "base": digest(p for p in trainer.model.parameters() if not p.requires_grad),
        "adapter": digest(p for p in trainer.model.parameters() if p.requires_grad),
        "differing": trainer.weights.differing(),
        "differences": [step["sampling/sampling_logp_difference/mean"] for step in steps],
    }
    Path(out_dir, f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

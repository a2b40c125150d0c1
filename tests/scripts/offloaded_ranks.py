"""Three steps of a small policy with the optimizer's state, gradients and layers' inputs in host memory, each and all.

Started by tests/extensions/offload/test_on_host.py.

    torchrun --nproc-per-node 2 offloaded_ranks.py OUT_DIR

In the second step one rank runs out of memory in its backward, and the step is begun anew; all steps are clipped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_ranks import CPU, Fault, backward_pass, fresh, rows

from colograd.extensions.offload import adamw, host_stream
from colograd.extensions.offload.adamw import HostAdamW
from colograd.extensions.offload.layer_inputs import LayerInputs, inputs_on_host
from colograd.extensions.offload.on_host import ON_HOST
from colograd.parallel.ranks import rank, world_size
from colograd.policy.lora import unwrap
from colograd.sharding import zero
from colograd.sharding.zero import STRATEGIES
from colograd.training.adamw_split import accumulate_in_float32

WAYS = ("", "stream", "gradients", "activations", "stream, gradients, activations")
STEPS, FAILING = 3, 1


def dense(dtype: torch.dtype) -> Any:
    return fresh(dtype)


def adapter(dtype: torch.dtype) -> Any:
    model = fresh(dtype)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


KINDS: dict[str, Callable[[torch.dtype], Any]] = {"dense": dense, "adapter": adapter}


def train(kind: str, dtype: str, strategy: str, way: str) -> dict[str, Any]:
    model = KINDS[kind](getattr(torch, dtype)).train()
    accumulate_in_float32(model.parameters())
    with inputs_on_host(unwrap(model), LayerInputs(CPU) if "activations" in way else None):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sharding = (ON_HOST if "gradients" in way else STRATEGIES)[strategy](model)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, norms, said = HostAdamW(own, lr=1e-2, streamed="stream" in way), [], []
    sharding.share(optimizer)
    mine, fault = rows()[rank() :: world_size()], Fault("backward memory", unwrap(model))
    for step in range(STEPS):
        try:
            backward_pass(model, sharding, mine, step - FAILING, fault)
        except Exception as error:
            said.append(type(error).__name__)
            sharding.discard()
            model.zero_grad()
            backward_pass(model, sharding, mine, step - FAILING)
        norms.append(sharding.clip(1e-3))
        optimizer.step()
        model.zero_grad()
    sharding.close()
    found = hashlib.sha256()
    for parameter in own:
        found.update(parameter.detach().float().numpy().tobytes())
    return {"weights": found.hexdigest(), "norms": norms, "said": said}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    zero.buckets_of.__defaults__ = (4096, None)
    adamw.ELEMENTS = host_stream.ELEMENTS = 1000
    host_stream.LIMIT = 20000
    results = {
        f"{kind} {dtype} {strategy}": {way: train(kind, dtype, strategy, way) for way in WAYS}
        for kind, dtype, strategy in itertools.product(KINDS, ("float32", "bfloat16"), ON_HOST)
    }
    Path(sys.argv[1], f"rank{rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

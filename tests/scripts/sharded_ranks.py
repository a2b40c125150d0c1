"""Six optimizer steps in each sharding strategy, on gradients with exact sums.

Started by tests/sharding/test_sharding.py.

    torchrun --nproc-per-node N sharded_ranks.py OUT_DIR [CHECKPOINTS]

Each step sums the gradients of four rows, dealt out among the ranks: small multiples of 1/64, so that no order of
additions rounds. With CHECKPOINTS, the state after three steps is loaded from there, as other ranks have saved it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.parallel.ranks import rank, world_size
from colograd.policy.logprobs import calls
from colograd.runtime import registry
from colograd.sharding import ShardingStrategy, zero
from colograd.sharding.zero import STRATEGIES as OF_CORE
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32

ON_HOST: dict[str, type[ShardingStrategy]] = {}
if "offload" in registry.installed():
    from colograd.extensions.offload import adamw, host_stream
    from colograd.extensions.offload.on_host import ON_HOST

    adamw.ELEMENTS = host_stream.ELEMENTS = 1000
    host_stream.LIMIT = 20000

STRATEGIES = OF_CORE | dict(zip(["fsdp"], registry.hooks("sharding:fsdp"), strict=False))  # if it is there
STEPS, ROWS, SAVED = 6, 4, 3
WAYS = [*STRATEGIES]
HOST = " on the host"  # with sums of gradients there, and the optimizer's state too
CASES = [(way, dtype) for way in (*WAYS, *(f"{way}{HOST}" for way in ON_HOST)) for dtype in ("bfloat16", "float32")]


def fresh(dtype: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=130, hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(getattr(torch, dtype))


def row_loss(model: LlamaForCausalLM, step: int, row: int, all_used: bool) -> torch.Tensor:
    """Each parameter times random numbers, while its module is called: then at the latest it is whole."""
    draw = torch.Generator().manual_seed(100 * step + row)
    factors = {name: torch.randint(-8, 9, p.shape, generator=draw) / 64 for name, p in model.named_parameters()}
    unused = [name for name in factors if name.endswith("k_proj.weight") and row % 2 and step + 1 == STEPS]
    for name in unused:
        if all_used:
            factors[name].zero_()
        else:
            del factors[name]

    def of(module: torch.nn.Module, prefix: str, *without: str) -> torch.Tensor:
        named = [(f"{prefix}{name}", p) for name, p in module.named_parameters()]
        return sum((p.float() * factors[n]).sum() for n, p in named if n in factors and not n.startswith(without))

    def whole() -> torch.Tensor:
        total = of(model, "", "model.layers.", "model.norm.")
        for index, layer in enumerate(model.model.layers):
            with calls(layer, lambda layer=layer, index=index: of(layer, f"model.layers.{index}.")):
                total = total + layer()
        return total + of(model.model.norm, "model.norm.")  # last, as in a model: its gradient is then the first

    with calls(model, whole), getattr(model, "around_forward", nullcontext)():
        return model()


class Watch:
    """The most bytes of gradients alive at once in this rank's backwards."""

    def __init__(self, model: torch.nn.Module, way: ShardingStrategy) -> None:
        self.model, self.way, self.peak, self.off = model, way, 0, False
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def look(self) -> None:
        if self.off:
            return
        sums = [bucket.sum for bucket in getattr(self.way, "buckets", ()) if bucket.sum is not None]
        if isinstance(self.way, STRATEGIES.get("fsdp", ())):  # its blocks are measured by fsdp_ranks.py
            sums = [piece.part.grad for piece in self.way.owned() if piece.part.grad is not None]
        else:
            sums += [p.grad for p in self.model.parameters() if p.grad is not None]
            sums += [tensor for one in getattr(self.way, "_under_way", ()) for tensor in one[1:3]]
        self.peak = max(self.peak, sum(total.nbytes for total in sums))


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = getattr(parameter, "full_tensor", lambda kept=parameter: kept)()
        found.update(whole.detach().float().numpy().tobytes())
    return found.hexdigest()


def train(name: str, dtype: str, checkpoints: Path | None, out: Path) -> dict[str, Any]:
    model = fresh(dtype)
    accumulate_in_float32(model.parameters())
    addresses = [p.data_ptr() for p in model.parameters()]
    strategy, on_host = name.removesuffix(HOST), name.endswith(HOST)
    way = (ON_HOST if on_host else STRATEGIES)[strategy if world_size() > 1 else "none"](model)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = adamw.HostAdamW(groups, lr=1e-2, streamed=True) if on_host else AdamWSplit(groups, lr=1e-2)
    way.share(optimizer)
    watch, first = Watch(model, way), 0
    all_used = name == "fsdp" and dtype == "bfloat16"  # where a gradient that one rank doesn't have is an error
    if checkpoints is not None:
        folder = checkpoints / f"{name}-{dtype}"
        if not way.load_weights(folder):
            model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        if not way.load_optimizer(optimizer, folder):
            optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
        way.gather_weights()
        first = SAVED
    seen: list[dict[str, Any]] = []
    way.traffic.take()
    for step in range(first, STEPS):
        watch.off = step + 1 == STEPS  # buckets wait for a gradient that doesn't come
        for row in range(rank(), ROWS, world_size()):
            way.backward(row_loss(model, step, row, all_used))
        way.sum_gradients()
        norm = way.clip(0.5)
        optimizer.step()
        model.zero_grad()
        seen.append({"weights": digest(model), "norm": norm, **way.traffic.take()})
        if step + 1 == SAVED:
            folder = out / f"{name}-{dtype}"
            folder.mkdir(exist_ok=True)
            if (name, dtype) != ("none", "float32"):
                way.save_optimizer(optimizer, folder, keep=rank() == 0)
            elif rank() == 0:  # as in older checkpoints
                torch.save(optimizer.state_dict(), folder / "optimizer.pt")
            whole = way.state_dict(keep=rank() == 0)
            if rank() == 0:
                weights = model.state_dict() if whole is None else whole
                weights.pop("lm_head.weight")  # tied
                save_file(weights, folder / "model.safetensors")
    state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
    return {
        "steps": seen,
        "stayed": addresses == [p.data_ptr() for p in model.parameters()],
        "state": sum(value.nbytes for value in state),
        "gradients": watch.peak,
        "parameters": sum(p.numel() for p in model.parameters()),
        "largest": max(p.numel() for p in model.parameters()),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    zero.buckets_of.__defaults__ = (4096, None)  # several buckets, with one parameter and with many
    out = Path(sys.argv[1])
    checkpoints = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    results = {}
    for name, dtype in CASES:
        results[f"{name}-{dtype}"] = train(name, dtype, checkpoints, out)
        dist.barrier()
    (out / f"rank{rank()}-of-{world_size()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
